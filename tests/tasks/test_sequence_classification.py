"""Sequence classification from real files: what the model reads, what it learns from it, what is refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from snugtune import tasks
from snugtune.config import RunConfig
from snugtune.data.batching import EvaluationPasses, Plan, Updates
from snugtune.errors import DataError, ModelError, UsageError
from snugtune.step import Choices, Hyperparameters, Step

CPU = torch.device("cpu")
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GOOD = [
    "the film was good",
    "a very good book and fun",
    "great fun",
    "i vote the team is great , very great !",
]
BAD = ["the film was bad", "a very boring book and awful", "awful", "the market is bad and it was not fun"]
SCALE = ["awful", "bad", "good", "great"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, so that no test finds what another one has tokenised."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def model(build_tiny_model: Callable[..., Path]) -> Path:
    """A tiny BERT without dropout, so that updates can be compared."""
    return build_tiny_model(**NO_DROPOUT)


def write_csv(path: Path, header: list[str], rows: Iterable[Iterable[object]]) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


def write_jsonl(path: Path, rows: Iterable[dict[str, object]]) -> str:
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


def many(texts: list[str], count: int) -> list[str]:
    return [f"{texts[n % len(texts)]} {'it is ' * (n % 5)}".strip() for n in range(count)]


def single(path: Path, rows: int = 24) -> dict[str, object]:
    texts = [text for pair in zip(many(GOOD, rows), many(BAD, rows), strict=True) for text in pair][:rows]
    labels = ["好" if n % 2 == 0 else "差" for n in range(rows)]
    return {"train": write_csv(path / "single.csv", ["text", "label"], zip(texts, labels, strict=True))}


def several(path: Path) -> dict[str, object]:
    words = ["film", "book", "team"]
    rows = [[f"the {words[n % 3]} is {'very ' * (n // 3)}fun", words[n % 3]] for n in range(24)]
    rows += [[f"the team was {'very ' * n}awful", "team"] for n in range(6)]
    return {"train": write_csv(path / "several.csv", ["text", "label"], rows)}


def pairs(path: Path) -> dict[str, object]:
    rows = [[GOOD[n % 4], (GOOD if n % 2 else BAD)[n % 3], ["no", "yes"][n % 2]] for n in range(24)]
    return {"train": write_csv(path / "pairs.csv", ["sentence1", "sentence2", "label"], rows)}


def topics(n: int) -> list[str]:
    return [
        word
        for word, wanted in zip(["film", "book", "game"], [n & 1, n & 2, n & 4 and n < 16], strict=True)
        if wanted
    ]


def worded(n: int) -> str:
    """A text that names its topics; no two are alike, as copies would share a side of the split."""
    return " and ".join([*topics(n), "fun"]) + " very" * (n // 4)


def lists(path: Path) -> dict[str, object]:
    rows = [{"text": worded(n), "labels": topics(n)} for n in range(24)]
    return {"train": write_jsonl(path / "lists.jsonl", rows)}


def separated(path: Path) -> dict[str, object]:
    rows = [[worded(n), "|".join(topics(n))] for n in range(24)]
    return {"train": write_csv(path / "separated.csv", ["text", "label"], rows), "label_separator": "|"}


def marked(path: Path) -> dict[str, object]:
    names = ["book", "film", "game"]
    rows = [[worded(n), *(int(name in topics(n)) for name in names)] for n in range(24)]
    return {"train": write_csv(path / "marked.csv", ["text", *names], rows), "label_column": names}


def amounts(path: Path) -> dict[str, object]:
    rows = [[f"{'it is ' * (n // 4)}{SCALE[n % 4]}", n % 4 - 1.25] for n in range(24)]
    return {"train": write_csv(path / "amounts.csv", ["text", "score"], rows)}


FILES = {
    "single": single,
    "several": several,
    "pairs": pairs,
    "lists": lists,
    "separated": separated,
    "marked": marked,
    "amounts": amounts,
}
KINDS = {
    "single": "single-label",
    "several": "single-label",
    "pairs": "single-label",
    "amounts": "regression",
}


def make_config(model: Path, data: dict[str, object], **settings: Any) -> RunConfig:
    return RunConfig.model_validate({"model": {"name": str(model)}, "data": data, **settings})


def prepare(model: Path, data: dict[str, object], **settings: Any) -> tasks.Prepared:
    return tasks.prepare(make_config(model, data, **settings))


def make_step(task: tasks.Task, **choices: Any) -> Step:
    hyperparameters = Hyperparameters(clip_grad_norm=None, weight_decay=0.0)
    return Step(task, Choices(**{"optimizer": "sgd", **choices}), hyperparameters, device=CPU)


def first_update(prepared: tasks.Prepared, passes: int, rows: int = 16) -> list[dict[str, torch.Tensor]]:
    plan = Plan(batch_size=rows, passes=passes)
    return Updates(prepared.train, prepared.task.collate, plan=plan, seed=1, epochs=1)[0]


def unequal(prepared: tasks.Prepared, sizes: tuple[int, ...] = (2, 9, 5)) -> list[dict[str, torch.Tensor]]:
    """The rows of the first update, cut into passes of these sizes."""
    rows = np.random.default_rng([1, 0]).permutation(len(prepared.train))[: sum(sizes)]
    parts = np.split(rows, np.cumsum(sizes)[:-1])
    return [prepared.task.collate(prepared.train.rows.__getitems__(part.tolist())) for part in parts]


@pytest.mark.parametrize("name", FILES)
def test_the_model_reads_the_words_of_the_file_with_their_labels(name, model, tmp_path):
    prepared = prepare(model, {**FILES[name](tmp_path), "validation_fraction": 0.25})
    assert prepared.facts["label_kind"] == KINDS.get(name, "multi-label")
    from transformers import AutoTokenizer

    from snugtune.data.readers import read_table

    tokenizer = AutoTokenizer.from_pretrained(model)
    written, read = [], []
    for row in read_table(FILES[name](tmp_path)["train"]):
        texts = [row[column] for column in ("text", "sentence1", "sentence2") if column in row]
        label = row.get("label", row.get("score", row.get("labels", "")))
        if name == "marked":
            label = sorted(topic for topic in ("book", "film", "game") if row[topic] == "1")
        elif name == "separated":
            label = sorted(filter(None, label.split("|")))
        elif name == "lists":
            label = sorted(label)
        elif name == "amounts":
            label = float(label)
        written.append((" [SEP] ".join(text.replace(" ,", ",").replace(" !", "!") for text in texts), label))
    names = prepared.facts["label_names"]
    for examples in (prepared.train, prepared.validation):
        passes = EvaluationPasses(examples, prepared.task.collate, rows_per_pass=5)
        for batch in (passes[number] for number in range(len(passes))):
            assert batch["input_ids"].shape == batch["attention_mask"].shape
            assert int(batch["attention_mask"].sum()) == int((batch["input_ids"] != 0).sum())
            for ids, kinds, label in zip(
                batch["input_ids"], batch["token_type_ids"], batch["labels"], strict=True
            ):
                text = tokenizer.decode(ids[ids != 0])
                text = text.removeprefix("[CLS] ").removesuffix(" [SEP]")
                second = tokenizer.decode(ids[kinds == 1]).removesuffix(" [SEP]")
                assert (second == text.partition(" [SEP] ")[2]) if name == "pairs" else not kinds.any()
                if label.ndim == 1:
                    value = [names[number] for number in label.nonzero().flatten().tolist()]
                else:
                    value = names[int(label)] if names else float(label)
                read.append((text, value))
    assert sorted(map(str, read)) == sorted(map(str, written))
    assert len(read) == prepared.facts["rows"]["train"] + prepared.facts["rows"]["validation"]


@pytest.mark.parametrize("name", FILES)
def test_the_loss_is_the_one_that_transformers_computes(name, model, tmp_path):
    prepared = prepare(model, FILES[name](tmp_path))
    step, (batch,) = make_step(prepared.task), first_update(prepared, 1)
    with torch.no_grad():
        loss_sum, denominator = prepared.task.loss(step.model, batch)
        reference = step.model(**batch).loss
    assert float(loss_sum / denominator) == pytest.approx(float(reference), abs=1e-6)
    assert step.update([batch], number=0, learning_rate=1e-3).loss == pytest.approx(
        float(reference), abs=1e-6
    )


def reference_loss(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """The mean over the whole batch, as PyTorch defines it."""
    if logits.shape[-1] == 1:
        return F.mse_loss(logits.squeeze(-1), labels)
    if labels.ndim == 2:
        return F.binary_cross_entropy_with_logits(logits, labels, weight=weights)
    return F.cross_entropy(logits, labels, weight=weights)


NAMED = {
    "single": ({"好": 3.0, "差": 0.5}, [3.0, 0.5]),
    "several": ({"team": 0.25}, [1.0, 1.0, 0.25]),
    "lists": ({"game": 4.0, "film": 2.0}, [1.0, 2.0, 4.0]),
}


@pytest.mark.parametrize("layers", [0, 1, "all"])
@pytest.mark.parametrize(
    ("name", "weights"),
    [
        *((name, None) for name in FILES),
        *((name, "named") for name in NAMED),
        ("several", "balanced"),
        ("marked", "balanced"),
    ],
)
def test_an_update_in_unequal_passes_is_that_of_the_whole_batch(name, weights, layers, model, tmp_path):
    wanted, values = NAMED[name] if weights == "named" else (weights, None)
    prepared = prepare(model, FILES[name](tmp_path), training={"class_weights": wanted})
    vector = None if values is None else torch.tensor(values)
    if weights == "balanced":
        labels = torch.tensor(prepared.train.rows.labels)
        counts = labels.sum(dim=0) if labels.ndim == 2 else torch.bincount(labels)
        vector = len(labels) / (3 * counts)
        assert len(set(vector.tolist())) > 1
    step = make_step(prepared.task, checkpointed_layers=layers)
    assert step.checkpointed == {0: 0, 1: 1, "all": 2}[layers]
    reference = make_step(prepared.task).model
    whole = unequal(prepared, (16,))[0]
    inputs = {key: value for key, value in whole.items() if key != "labels"}
    loss = reference_loss(reference(**inputs).logits, whole["labels"], vector)
    loss.backward()
    did = step.update(unequal(prepared, (2, 9, 5)), number=0, learning_rate=1.0)
    assert did.loss == pytest.approx(loss.item(), abs=1e-6)
    assert did.samples == 16
    for (key, before), after in zip(reference.named_parameters(), step.model.parameters(), strict=True):
        expected = before.detach() - before.grad
        torch.testing.assert_close(
            after.detach(), expected, rtol=0, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("name", FILES)
def test_a_few_updates_lower_the_loss(name, model, tmp_path):
    prepared = prepare(model, FILES[name](tmp_path))
    step, passes = make_step(prepared.task, optimizer="adamw-fused"), first_update(prepared, 2)
    losses = [step.update(passes, number=n, learning_rate=1e-2).loss for n in range(25)]
    assert losses[-1] < 0.7 * losses[0]


def test_a_class_weight_that_is_not_named_is_one_and_zero_takes_a_class_out(model, tmp_path):
    prepared = prepare(model, several(tmp_path), training={"class_weights": {"team": 0.0}})
    step, (batch,) = make_step(prepared.task), first_update(prepared, 1, 27)
    changed = {**batch, "input_ids": torch.where((batch["labels"] == 2)[:, None], 5, batch["input_ids"])}
    assert not torch.equal(changed["input_ids"], batch["input_ids"])
    one, other = (prepared.task.loss(step.model, part) for part in (batch, changed))
    assert one[0].item() == pytest.approx(other[0].item(), rel=1e-6)
    assert int(one[1]) == int((batch["labels"] != 2).sum())


# What is set aside, and what is refused


def test_the_classes_keep_their_shares_in_what_is_set_aside(model, tmp_path):
    rows = [[f"{GOOD[n % 4]} {n}", "rare" if n % 10 == 0 else "common"] for n in range(200)]
    data = {"train": write_csv(tmp_path / "a.csv", ["text", "label"], rows), "validation_fraction": 0.2}
    prepared = prepare(model, data)
    counts = {
        where: np.bincount(examples.rows.labels).tolist()
        for where, examples in [("train", prepared.train), ("validation", prepared.validation)]
    }
    assert counts == {"train": [144, 16], "validation": [36, 4]}
    assert prepared.facts["rows"] == {"train": 160, "validation": 40}
    assert "40 rows set aside to measure on" in " ".join(prepared.notes)
    again = prepare(model, data)
    assert again.validation.rows.table["input_ids"] == prepared.validation.rows.table["input_ids"]


def test_a_file_of_its_own_measures_and_nothing_is_set_aside(model, tmp_path):
    own = write_csv(tmp_path / "own.csv", ["label", "text"], [["差", "this team is awful"]])
    prepared = prepare(model, {**single(tmp_path), "validation": own})
    assert prepared.facts["rows"] == {"train": 24, "validation": 1}
    assert "1 row to measure on" in " ".join(prepared.notes)
    assert prepared.validation.rows.labels == [1]


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the model may be loaded."""

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("something of the model was loaded")

    from snugtune.tasks import sequence_classification

    for name in ("load_model", "load_config", "load_tokenizer"):
        monkeypatch.setattr(sequence_classification, name, refuse)


@pytest.mark.usefixtures("no_loading")
def test_a_label_that_only_the_validation_data_has_is_refused_before_a_model_is_loaded(model, tmp_path):
    own = write_csv(tmp_path / "own.csv", ["text", "label"], [["fun", "好"], ["it was", "中"]])
    with pytest.raises(DataError, match=r"own.csv, row 2: the label '中' is not in the training data"):
        prepare(model, {**single(tmp_path), "validation": own})


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize("missing", ["text", "label"])
def test_a_column_that_the_validation_data_lacks_is_named(missing, model, tmp_path):
    header = [{missing: "other"}.get(name, name) for name in ("text", "label")]
    own = write_csv(tmp_path / "own.csv", header, [["fun", "好"]])
    with pytest.raises(DataError, match=rf"own.csv has no column '{missing}'") as raised:
        prepare(model, {**single(tmp_path), "validation": own})
    assert "other" in raised.value.why


@pytest.mark.usefixtures("no_loading")
def test_an_empty_text_of_the_validation_data_is_named_with_its_file(model, tmp_path):
    own = write_csv(tmp_path / "own.csv", ["text", "label"], [["fun", "好"], [" ", "差"]])
    with pytest.raises(DataError, match=r"own.csv: 1 of 2 rows have no text .* row 2"):
        prepare(model, {**single(tmp_path), "validation": own})


def test_rows_that_are_left_out_are_in_the_record_and_said(model, tmp_path):
    rows = [
        [text, label] for text, label in zip(many(GOOD, 12) + many(BAD, 12), "a" * 12 + "b" * 12, strict=True)
    ]
    rows[3:3] = [["", "a"], ["no label", " "]]
    data = {"train": write_csv(tmp_path / "a.csv", ["text", "label"], rows)}
    with pytest.raises(DataError, match=r"a.csv: 1 of 26 rows have no text .*row 4 \(line 5\)"):
        prepare(model, data)
    prepared = prepare(model, {**data, "bad_rows": "skip"})
    read = prepared.facts["read"]["train"]
    assert (read["rows"], read["kept"], read["refused"]) == (26, 24, 2)
    assert [row["line"] for row in read["first_refused"]] == [5, 6]
    assert "26 rows read, 24 kept, 2 left out: line 5: it has no text" in " ".join(prepared.notes)
    assert sum(prepared.facts["rows"].values()) == 24


def test_a_text_is_never_on_both_sides(model, tmp_path):
    rows = [
        [f"{text} {'very ' * n}", label]
        for n in range(4)
        for text, label in zip(GOOD[:3] + BAD[:3], "aaabbb", strict=True)
    ]
    data = {"train": write_csv(tmp_path / "a.csv", ["text", "label"], rows * 3), "validation_fraction": 0.3}
    prepared = prepare(model, data)
    sides = [
        {tuple(row) for row in examples.rows.table["input_ids"]}
        for examples in (prepared.train, prepared.validation)
    ]
    assert all(sides)
    assert sides[0].isdisjoint(sides[1])
    assert "48 rows repeat an earlier one" in " ".join(prepared.notes)
    assert len(prepared.facts["findings"]) == 1


@pytest.fixture
def no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time may be spent on tokenising."""

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("the texts were tokenised")

    from snugtune.tasks import sequence_classification

    monkeypatch.setattr(sequence_classification, "tokenise", refuse)


@pytest.mark.usefixtures("no_tokens")
@pytest.mark.parametrize(
    ("name", "metric", "known"),
    [
        ("single", "f1", "accuracy, macro_f1, loss"),
        ("amounts", "accuracy", "mse, pearson, spearman"),
        ("lists", "accuracy", "micro_f1, macro_f1, loss"),
    ],
)
def test_a_metric_that_these_labels_do_not_have_is_refused(name, metric, known, model, tmp_path):
    with pytest.raises(UsageError, match=f"evaluation.metric cannot be '{metric}'") as raised:
        prepare(model, FILES[name](tmp_path), evaluation={"metric": metric})
    assert known in raised.value.why


@pytest.mark.parametrize(
    ("name", "default", "other"),
    [("single", "accuracy", "loss"), ("lists", "micro_f1", "macro_f1"), ("amounts", "mse", "spearman")],
)
def test_the_metric_that_decides_has_a_default_and_can_be_named(name, default, other, model, tmp_path):
    data = FILES[name](tmp_path)
    assert prepare(model, data).task.metric == default
    assert prepare(model, data, evaluation={"metric": other}).task.metric == other


@pytest.mark.usefixtures("no_tokens")
def test_a_class_weight_for_an_unknown_label_is_refused(model, tmp_path):
    with pytest.raises(UsageError, match="names the label 'good', which the training data") as raised:
        prepare(model, single(tmp_path), training={"class_weights": {"good": 2.0, "好": 1.0}})
    assert "好, 差" in raised.value.why


@pytest.mark.usefixtures("no_tokens")
@pytest.mark.parametrize("weights", ["balanced", {"1": 2.0}])
def test_class_weights_for_numbers_are_refused(weights, model, tmp_path):
    with pytest.raises(UsageError, match="makes no sense here"):
        prepare(model, amounts(tmp_path), training={"class_weights": weights})


# Lengths


def test_a_length_beyond_the_model_is_lowered_and_said(model, tmp_path):
    rows = [row for word in SCALE for row in ([f"the film was {word} " * 40, "a"], [word, "b"])]
    data = {"train": write_csv(tmp_path / "long.csv", ["text", "label"], rows), "max_length": 5000}
    prepared = prepare(model, {**data, "validation_fraction": 0.25})
    assert prepared.facts["max_length"] == 64
    assert sorted(prepared.train.lengths.tolist()) == [3, 3, 3, 64, 64, 64]
    assert "max_length 5000 is more than the model takes: 64 is used" in prepared.notes
    step = make_step(prepared.task)
    assert step.update(first_update(prepared, 1, 6), number=0, learning_rate=1e-3).applied


@pytest.mark.parametrize("columns", [["text"], ["sentence1", "sentence2"]])
def test_the_share_of_texts_that_are_cut_off_is_exact_and_said(columns, model, tmp_path):
    long, fits = " ".join(["good"] * 20), " ".join(["good"] * (10 - len(columns)))
    rows = [
        [*[long] * len(columns), "a"],
        *[[*["good"] * (len(columns) - 1), fits, f"{n % 2}"] for n in range(9)],
    ]
    data = {"train": write_csv(tmp_path / "long.csv", [*columns, "label"], rows)}
    own = write_csv(tmp_path / "own.csv", [*columns, "label"], rows[:2])
    length = 9 + 2 if len(columns) == 1 else 1 + 8 + 3
    prepared = prepare(model, {**data, "validation": own, "max_length": length})
    assert prepared.facts["share_cut_off"] == {"train": 0.1, "validation": 0.5}
    assert int(prepared.train.lengths.max()) == length
    assert (
        f"1 of 10 (10%) of the texts are longer than {length} tokens and are cut off there" in prepared.notes
    )


def test_a_share_below_one_percent_is_not_called_zero(model, tmp_path):
    rows = [["good " * (40 if n == 0 else 2), f"{n % 2}"] for n in range(300)]
    own = write_csv(tmp_path / "own.csv", ["text", "label"], rows[:2])
    data = {
        "train": write_csv(tmp_path / "long.csv", ["text", "label"], rows),
        "validation": own,
        "max_length": 30,
    }
    assert prepare(model, data).notes[-1].startswith("1 of 300 (less than 1%) of the texts are longer")


@pytest.mark.parametrize(("name", "least"), [("single", 3), ("pairs", 5)])
def test_a_length_without_room_for_text_is_refused(name, least, model, tmp_path):
    data = FILES[name](tmp_path)
    with pytest.raises(UsageError, match="leaves no room for text") as raised:
        prepare(model, {**data, "max_length": least - 1})
    assert f"{least} or more" in raised.value.do
    assert int(prepare(model, {**data, "max_length": least}).train.lengths.max()) == least


def test_a_tokenizer_of_another_model_is_refused(build_tiny_model, model, tmp_path):
    from transformers import BertConfig, BertModel

    folder = build_tiny_model()
    config = BertConfig.from_pretrained(folder, vocab_size=90)
    BertModel(config).save_pretrained(folder)
    with pytest.raises(ModelError, match="the tokenizer does not belong to the model") as raised:
        prepare(folder, single(tmp_path))
    assert "the model knows 90 tokens" in raised.value.why


# The cache


@pytest.fixture
def count_texts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts each call of a tokenizer got."""
    from transformers import PreTrainedTokenizerBase

    calls: list[int] = []
    real = PreTrainedTokenizerBase.__call__

    def count(self: Any, text: Any = None, *args: Any, **options: Any) -> Any:
        calls.append(len(text))
        return real(self, text, *args, **options)

    monkeypatch.setattr(PreTrainedTokenizerBase, "__call__", count)
    return calls


@pytest.mark.parametrize("own_validation", [False, True])
def test_texts_are_tokenised_once_and_found_again_on_disk(
    own_validation, model, tmp_path, cache, count_texts
):
    own = write_csv(tmp_path / "own.csv", ["text", "label"], [["it was fun", "好"]])
    data = {**single(tmp_path), **({"validation": own} if own_validation else {})}
    first = prepare(model, data)
    assert sum(count_texts) == (25 if own_validation else 24)
    assert list(cache.rglob("cache-*.arrow"))
    count_texts.clear()
    second = prepare(model, data)
    assert count_texts == []
    for one, other in [(first.train, second.train), (first.validation, second.validation)]:
        assert one.rows.table[:] == other.rows.table[:]
        assert one.lengths.tolist() == other.lengths.tolist()
    assert first.facts == second.facts


def test_another_length_tokenizer_or_file_is_tokenised_anew(model, build_tiny_model, tmp_path, count_texts):
    data = single(tmp_path)
    prepare(model, data)
    other = build_tiny_model(words=["film", "book"], **NO_DROPOUT)
    for changed in (
        lambda: prepare(model, {**data, "max_length": 4}),
        lambda: prepare(other, data),
        lambda: prepare(model, single(tmp_path, rows=30)),
    ):
        count_texts.clear()
        prepared = changed()
        assert sum(count_texts) == sum(prepared.facts["rows"].values())


def test_other_labels_for_the_same_texts_are_not_mixed_up_with_the_cached_ones(model, tmp_path):
    data = single(tmp_path)
    before = prepare(model, data)
    file = Path(str(data["train"]))
    text = file.read_text(encoding="utf-8").translate(str.maketrans("好差", "差好"))
    file.write_text(text, encoding="utf-8")
    after = prepare(model, data)
    old, new = (
        {tuple(row["input_ids"]): int(row["labels"]) for row in prepared.train.rows}
        for prepared in (before, after)
    )
    both = old.keys() & new.keys()
    assert len(both) > 10
    assert all(new[ids] == 1 - old[ids] for ids in both)


# Planning


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("shape", [(1, 3), (7, 64)])
def test_the_example_batch_has_the_size_asked_for_and_trains(name, shape, model, tmp_path):
    prepared = prepare(model, FILES[name](tmp_path))
    batch, (real,) = prepared.task.example_batch(*shape), first_update(prepared, 1)
    assert batch.keys() == real.keys()
    assert {key: value.dtype for key, value in batch.items()} == {
        key: value.dtype for key, value in real.items()
    }
    assert batch["input_ids"].shape == shape
    assert batch["labels"].shape == (shape[0], *real["labels"].shape[1:])
    did = make_step(prepared.task).update([batch], number=0, learning_rate=1e-3)
    assert did.applied
    assert (did.samples, did.tokens, did.padding) == (shape[0], shape[0] * shape[1], 0.0)
