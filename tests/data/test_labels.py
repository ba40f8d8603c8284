"""Labels of every kind, as they come out of files and of typed tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from snugtune.data.columns import Columns
from snugtune.data.labels import Labels, check_texts, encode_labels, learn_labels
from snugtune.errors import DataError, UsageError


def table(values: list[Any], feature: Any = None, **more: list[Any]) -> Any:
    """A data set with a text in each row, and these labels."""
    from datasets import Dataset, Features, Value

    data = {"text": [f"text {row}" for row in range(len(values))], "label": values, **more}
    features = Features(text=Value("string"), label=feature) if feature is not None else None
    return Dataset.from_dict(data, features=features)


def used(*labels: str) -> Columns:
    return Columns(text="text", text_pair=None, labels=labels or ("label",))


def learn(data: Any, *labels: str, **options: Any) -> Labels:
    return learn_labels(data, used(*labels), **options, where="train.csv")


def encode(data: Any, labels: Labels, *names: str, **options: Any) -> Any:
    return encode_labels(data, used(*names), labels, **options, where="valid.csv")


@pytest.mark.parametrize(
    ("values", "names", "codes"),
    [
        (["pos", "neg", " pos "], ["neg", "pos"], [1, 0, 1]),
        (["10", "9", "-1"], ["-1", "9", "10"], [2, 1, 0]),
        ([10, 9, 9], ["9", "10"], [1, 0, 0]),
        (["1.0", "0.0", "1."], ["0", "1"], [1, 0, 1]),
        ([1.0, 0.0, 1.0], ["0", "1"], [1, 0, 1]),
        (["01", "1", "01"], ["01", "1"], [0, 1, 0]),
        (["1.0", "2.0", "other"], ["1.0", "2.0", "other"], [0, 1, 2]),
        ([True, False, True], ["false", "true"], [1, 0, 1]),
        (["好", "坏", "好"], ["坏", "好"], [1, 0, 1]),
        (["NA", "null", "NA"], ["NA", "null"], [0, 1, 0]),
        (["nan", "1.5", "2"], ["1.5", "2", "nan"], [2, 0, 1]),
    ],
)
def test_scalars_are_classes(values: list[Any], names: list[str], codes: list[int]) -> None:
    data = table(values)
    labels = learn(data)
    assert labels == Labels(kind="single-label", names=tuple(names))
    encoded = encode(data, labels)
    assert encoded.dtype == np.int64
    assert encoded.tolist() == codes


@pytest.mark.parametrize("values", [["1", "2.5", "3"], [1.0, 2.5, 3.0], ["1e0", "2.5", " 3.0"]])
def test_numbers_that_are_not_whole_are_amounts(values: list[Any]) -> None:
    labels = learn(table(values))
    assert labels == Labels(kind="regression", names=())
    encoded = encode(table(values), labels)
    assert encoded.dtype == np.float32
    assert encoded.tolist() == [1.0, 2.5, 3.0]


def test_the_kind_can_be_named() -> None:
    assert learn(table(["1", "2"]), kind="regression").kind == "regression"
    assert learn(table(["1.5", "2"]), kind="single-label").names == ("1.5", "2")


def test_validation_may_write_the_same_class_in_another_way() -> None:
    labels = learn(table(["0", "1"]))
    assert encode(table([1.0, 0.0]), labels).tolist() == [1, 0]
    assert encode(table(["1.0", "0"]), labels).tolist() == [1, 0]
    assert encode(table([1, 0]), labels).tolist() == [1, 0]


def test_class_labels_keep_their_names_and_order() -> None:
    from datasets import ClassLabel

    data = table([2, 0], ClassLabel(names=["zero", "unused", "a"]))
    labels = learn(data)
    assert labels.names == ("zero", "unused", "a")
    assert encode(data, labels).tolist() == [2, 0]
    other = table([0, 1], ClassLabel(names=["a", "zero"]))
    assert encode(other, labels).tolist() == [2, 0]


def test_lists_are_several_labels() -> None:
    data = table([["b", "a"], [], ["c", "b"]])
    labels = learn(data)
    assert labels == Labels(kind="multi-label", names=("a", "b", "c"))
    encoded = encode(data, labels)
    assert encoded.dtype == np.float32
    assert encoded.tolist() == [[1, 1, 0], [0, 0, 0], [0, 1, 1]]
    assert encode(data.select([2, 0]), labels).tolist() == [[0, 1, 1], [1, 1, 0]]


def test_lists_of_class_labels_keep_their_order() -> None:
    from datasets import ClassLabel, Features, Sequence, Value

    features = Features(text=Value("string"), label=Sequence(ClassLabel(names=["z", "y"])))
    data = table([[0], [1, 0]]).cast(features)
    labels = learn(data)
    assert labels.names == ("z", "y")
    assert encode(data, labels).tolist() == [[1, 0], [1, 1]]


def test_a_separator_splits_cells() -> None:
    data = table(["b| a", "", "a||c"])
    labels = learn(data, separator="|")
    assert labels == Labels(kind="multi-label", names=("a", "b", "c"))
    assert encode(data, labels, separator="|").tolist() == [[1, 1, 0], [0, 0, 0], [1, 0, 1]]


def test_several_columns_of_zeros_and_ones_are_several_labels() -> None:
    data = table(["x"] * 3, toxic=["1", "0", "1.0"], rude=[False, True, False])
    labels = learn(data, "toxic", "rude")
    assert labels == Labels(kind="multi-label", names=("toxic", "rude"))
    assert encode(data, labels, "toxic", "rude").tolist() == [[1, 0], [0, 1], [1, 0]]


def refusal(values: list[Any], **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        learn(table(values), **options)
    return str(caught.value)


def test_missing_labels_are_counted_and_placed() -> None:
    says = refusal(["a", "", "b", "  ", "a"])
    assert "train.csv: 2 of 5 rows have no label" in says
    assert "row 2, 4" in says
    assert "row 1" in refusal([None, 1, 2])
    assert "row 2" in refusal([1.0, float("nan"), 2.0])
    assert "row 2" in refusal([["a"], None, ["b"]])
    assert "row 3" in refusal([["a"], ["b"], ["b", None]])
    assert ", ..." in refusal([""] * 20 + ["a"])


def test_an_unlabelled_row_of_class_labels_is_missing() -> None:
    from datasets import ClassLabel

    with pytest.raises(DataError, match="row 2"):
        learn(table([0, -1, 1], ClassLabel(names=["a", "b"])))


def test_one_class_is_refused() -> None:
    assert "only one class: 'a'" in refusal(["a", "a"])
    assert "only one class" in refusal([["a"], []])


def test_free_text_is_not_taken_for_labels() -> None:
    texts = [f"answer {row}" for row in range(1001)]
    assert "looks like free text" in refusal(texts)
    assert "looks like amounts" in refusal(list(range(1001)))
    assert len(learn(table(texts), kind="single-label").names) == 1001


def test_an_unknown_label_is_named_with_its_row() -> None:
    labels = learn(table(["a", "b"]))
    with pytest.raises(DataError, match=r"valid\.csv, row 3: the label 'c'"):
        encode(table(["a", "b", "c"]), labels)
    lists = learn(table([["a"], ["b"]]))
    with pytest.raises(DataError, match=r"valid\.csv, row 2: the label 'c'"):
        encode(table([["a", "b"], ["b", "c"]]), lists)


def test_words_are_not_numbers() -> None:
    labels = Labels(kind="regression", names=())
    for wrong in ("three", "inf", "nan"):
        with pytest.raises(DataError, match=f"row 2: '{wrong}' .* is not a number"):
            encode(table(["1.5", wrong]), labels)
    with pytest.raises(DataError, match="row 2"):
        encode(table(["1.5", ""]), labels)


def test_marks_are_zero_or_one() -> None:
    data = table(["x"] * 2, toxic=["1", "2"], rude=["0", "1"])
    with pytest.raises(DataError, match=r"row 2: '2' in the column 'toxic'"):
        encode(data, Labels(kind="multi-label", names=("toxic", "rude")), "toxic", "rude")


def test_kinds_that_do_not_go_with_the_columns_are_refused() -> None:
    with pytest.raises(UsageError, match="label_separator"):
        learn(table(["a", "b"]), kind="multi-label")
    with pytest.raises(UsageError, match="multi-label"):
        learn(table([["a"], ["b"]]), kind="single-label")
    with pytest.raises(UsageError, match="regression"):
        learn(table(["1"], other=["0"]), "label", "other", kind="regression")


def test_other_types_are_refused() -> None:
    import datetime

    assert "cannot be used as labels" in refusal(
        [datetime.datetime(2020, 1, 1), datetime.datetime(2021, 1, 1)]
    )
    assert "cannot be used as labels" in refusal([{"a": 1}, {"a": 2}])


def test_a_selection_of_rows_is_encoded_in_its_order() -> None:
    data = table(["a", "b", "c", "a"])
    labels = learn(data)
    assert encode(data.select([3, 2, 1]), labels).tolist() == [0, 2, 1]


def test_labels_in_several_chunks_are_encoded_as_one() -> None:
    from datasets import concatenate_datasets

    data = concatenate_datasets([table(["a", "b"]), table(["c", "a"])])
    assert encode(data, learn(data)).tolist() == [0, 1, 2, 0]


def test_empty_texts_are_counted_and_placed() -> None:
    from datasets import Dataset

    data = Dataset.from_dict({"text": ["a", " \n", None], "second": ["a", "b", "c"]})
    with pytest.raises(DataError, match=r"2 of 3 rows have no text in the column 'text': row 2, 3"):
        check_texts(data, used(), "train.csv")
    check_texts(data.select([0]), used(), "train.csv")
    pair = Columns(text="second", text_pair="text", labels=())
    with pytest.raises(DataError, match="'text'"):
        check_texts(data, pair, "train.csv")


def test_numbers_are_not_texts() -> None:
    with pytest.raises(DataError, match="int64"):
        check_texts(table([1, 2]), Columns(text="label", text_pair=None, labels=()), "train.csv")
