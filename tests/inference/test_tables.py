"""Answers and scores of finished models: as transformers' pipeline has them, in the order of the data."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import pipeline

import snugtune
from inference.samples import MAX_LENGTH, TEXTS, read_csv, write_csv
from snugtune.errors import DataError, HardwareError, UsageError
from snugtune.inference import predictor
from snugtune.step import Step

KINDS = ["single", "several", "tags", "number", "pair"]


def told_by_the_pipeline(run: Path, kind: str) -> list[dict[str, object]]:
    """What transformers says about TEXTS, in the columns of our answers."""
    classify = pipeline("text-classification", str(run / "model"), truncation=True)
    asked = [{"text": text, "text_pair": text[::-1]} if kind == "pair" else text for text in TEXTS]
    if kind not in ("several", "tags"):
        found = [classify(one) for one in asked]
        found = [one[0] if isinstance(one, list) else one for one in found]
        if kind == "number":
            return [{"predicted_value": one["score"]} for one in found]
        return [{"predicted_label": one["label"], "predicted_score": one["score"]} for one in found]
    answers = []
    for one in classify(asked, top_k=None):
        scores = {score["label"]: score["score"] for score in one}
        names = [name for name in classify.model.config.id2label.values() if scores[name] > 0.5]
        joined = (";" if kind == "tags" else "|").join(names)
        answers.append(
            {
                "predicted_labels": joined,
                **{f"predicted_score_{name}": value for name, value in scores.items()},
            }
        )
    return answers


def assert_same(found: list[dict[str, object]], expected: list[dict[str, object]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value == (
                pytest.approx(other[name], abs=1e-5) if isinstance(value, float) else other[name]
            )


def ask(run: Path, kind: str, texts: list[str] = TEXTS) -> snugtune.Predictions:
    pairs = [text[::-1] for text in texts] if kind == "pair" else None
    return snugtune.predict(run, texts=texts, text_pairs=pairs, quiet=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_answers_are_those_of_the_pipeline(finished, kind):
    run = finished(kind)
    expected = told_by_the_pipeline(run, kind)
    assert len({str(answer) for answer in expected}) > 5
    done = ask(run, kind)
    assert_same(done.answers, expected)
    assert done.rows == len(TEXTS)
    assert done.cut_off > 0  # TEXTS has some beyond MAX_LENGTH, which both cut
    assert (run / "model" / "tokenizer_config.json").read_text().count(
        f'"model_max_length": {MAX_LENGTH}'
    ) == 1


@pytest.mark.parametrize("window", [1, 7, len(TEXTS), 1000])
def test_windows_of_any_size_give_the_same_in_the_order_of_the_data(finished, tmp_path, monkeypatch, window):
    data = write_csv(tmp_path / "new.csv", ["id", "text"], list(enumerate(TEXTS)))
    monkeypatch.setattr(predictor, "WINDOW_ROWS", window)
    done = snugtune.predict(finished("single"), data=data, output=tmp_path / "answers.csv", quiet=True)
    header, *rows = read_csv(tmp_path / "answers.csv")
    assert header == ["id", "text", "predicted_label", "predicted_score"]
    assert [row[:2] for row in rows] == [[str(number), text] for number, text in enumerate(TEXTS)]
    answers = [{"predicted_label": row[2], "predicted_score": float(row[3])} for row in rows]
    assert_same(answers, ask(finished("single"), "single").answers)
    assert (done.rows, done.output, done.answers) == (len(TEXTS), tmp_path / "answers.csv", None)


def test_only_a_window_is_in_memory(finished, tmp_path, monkeypatch):
    data = write_csv(tmp_path / "new.csv", ["text"], [[text] for text in TEXTS])
    monkeypatch.setattr(predictor, "WINDOW_ROWS", 5)
    sizes = []
    real = predictor.encode_texts

    def watched(texts, *rest, **more):
        sizes.append(len(texts[0]))
        return real(texts, *rest, **more)

    monkeypatch.setattr(predictor, "encode_texts", watched)
    snugtune.predict(finished("single"), data=data, output=tmp_path / "answers.csv", quiet=True)
    assert sizes == [5, 5, 5, 5, 3]


def test_rows_share_a_pass_with_rows_of_like_length(finished, monkeypatch):
    shapes = []
    real = Step.evaluate

    def watched(self, batch):
        shapes.append(tuple(batch["input_ids"].shape))
        return real(self, batch)

    monkeypatch.setattr(Step, "evaluate", watched)
    ask(finished("single"), "single", ["good " * (row * 7 % 20) for row in range(60)])
    lengths = [length for _, length in shapes]
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) > 2
    assert all(rows * length <= 8 * MAX_LENGTH for rows, length in shapes)
    assert shapes[-1][0] > shapes[0][0]  # short texts, more of them


@pytest.mark.parametrize("fitting", [1, 3])
def test_when_memory_is_short_the_passes_get_smaller(finished, monkeypatch, capsys, fitting):
    expected = ask(finished("single"), "single").answers
    real, tried = Step.evaluate, []

    def small(self, batch):
        tried.append(len(batch["input_ids"]))
        if tried[-1] > fitting:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(self, batch)

    monkeypatch.setattr(Step, "evaluate", small)
    done = snugtune.predict(finished("single"), texts=TEXTS)
    assert_same(done.answers, expected)
    assert "in a pass did not fit the card" in capsys.readouterr().err
    assert sum(rows > fitting for rows in tried) < sum(rows <= fitting for rows in tried)


def test_when_not_even_one_row_fits_the_error_says_what_to_do(finished, monkeypatch):
    def full(self, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    monkeypatch.setattr(Step, "evaluate", full)
    with pytest.raises(HardwareError, match=r"Tried to allocate 2\.00 GiB") as caught:
        snugtune.predict(finished("single"), texts=TEXTS, quiet=True)
    assert "CUDA_VISIBLE_DEVICES" in caught.value.do


def test_missing_and_empty_texts_are_answered_and_counted(finished, tmp_path, capsys):
    rows = ['{"text": "a good film"}', '{"text": null}', '{"text": ""}', '{"text": "  "}', '{"text": "bad"}']
    (tmp_path / "new.jsonl").write_text("\n".join(rows))
    done = snugtune.predict(finished("single"), data=tmp_path / "new.jsonl")
    assert done.without_text == 3
    assert "3 rows without text" in capsys.readouterr().err
    empty = done.answers[1]
    assert done.answers[2] == done.answers[3] == empty != done.answers[0]
    assert_same([empty], ask(finished("single"), "single", [""]).answers)


def test_a_column_in_which_no_text_is_given_is_answered(finished, tmp_path):
    pq.write_table(pa.table({"text": pa.array([None, None]), "id": [1, 2]}), tmp_path / "new.parquet")
    assert snugtune.predict(finished("single"), data=tmp_path / "new.parquet", quiet=True).without_text == 2


def test_an_empty_text_is_answered_where_the_tokenizer_adds_nothing(finished, monkeypatch):
    real = predictor.encode_texts

    def bare(texts, tokenizer, *, limit):
        encoded = real(texts, tokenizer, limit=limit)
        for name in ("input_ids", "token_type_ids"):
            encoded[name] = [ids[1:-1] for ids in encoded[name]]
        return {**encoded, "length": [len(ids) for ids in encoded["input_ids"]]}

    monkeypatch.setattr(predictor, "encode_texts", bare)
    answers = ask(finished("single"), "single", ["good film", ""]).answers
    assert all(math.isfinite(answer["predicted_score"]) for answer in answers)


def test_names_that_the_data_has_already_get_a_number(finished, tmp_path, capsys):
    names = ["predicted_score", "text", "predicted_score_2"]
    data = write_csv(tmp_path / "new.csv", names, [["old", "good", "older"]])
    snugtune.predict(finished("single"), data=data, output=tmp_path / "answers.csv")
    header, row = read_csv(tmp_path / "answers.csv")
    assert header == [*names, "predicted_label_3", "predicted_score_3"]
    assert row[:3] == ["old", "good", "older"]
    assert "predicted_label_3, predicted_score_3" in capsys.readouterr().err


def test_the_column_can_be_another_one(finished, tmp_path):
    data = write_csv(tmp_path / "new.csv", ["text", "body"], [["bad", text] for text in TEXTS])
    done = snugtune.predict(finished("single"), data=data, text_column="body", quiet=True)
    assert_same(done.answers, ask(finished("single"), "single").answers)
    pairs = write_csv(tmp_path / "pairs.csv", ["a", "sentence2"], [[text, text[::-1]] for text in TEXTS])
    done = snugtune.predict(finished("pair"), data=pairs, text_column="a", quiet=True)
    assert_same(done.answers, ask(finished("pair"), "pair").answers)


@pytest.mark.parametrize(
    ("kind", "more", "part"),
    [
        ("single", {"text_column": "txet"}, "did you mean 'text'"),
        ("single", {"text_pair_column": "text"}, "leave --text-pair-column out"),
        ("pair", {}, "no column 'sentence1'"),
        ("single", {"precision": "int8"}, "training.precision cannot be 'int8'"),
        ("single", {"texts": ["a"]}, "both are given"),
    ],
)
def test_wrong_usage_is_refused(finished, tmp_path, kind, more, part):
    data = write_csv(tmp_path / "new.csv", ["id", "text"], [[1, "good"]])
    with pytest.raises(UsageError, match=part):
        snugtune.predict(finished(kind), data=data, **more)


def test_texts_and_second_texts_must_fit_the_model(finished):
    with pytest.raises(UsageError, match="neither"):
        snugtune.predict(finished("single"))
    with pytest.raises(UsageError, match="0 second texts"):
        snugtune.predict(finished("pair"), texts=["a"])
    with pytest.raises(UsageError, match="leave --text-pair out"):
        snugtune.predict(finished("single"), texts=["a"], text_pairs=["b"])


def test_a_column_of_something_else_is_refused(finished, tmp_path):
    (tmp_path / "new.jsonl").write_text('{"text": 1}\n{"text": 2}\n')
    with pytest.raises(DataError, match="does not hold texts"):
        snugtune.predict(finished("single"), data=tmp_path / "new.jsonl")


# Evaluation


@pytest.mark.parametrize("kind", KINDS)
def test_the_scores_are_those_of_the_answers(finished, tmp_path, kind):
    run = finished(kind)
    data = run.parent / "data.csv"
    scores = snugtune.evaluate(run, data, quiet=True)
    header, *rows = read_csv(data)
    answers = snugtune.predict(run, data=data, quiet=True).answers
    if kind == "number":
        errors = [
            answer["predicted_value"] - float(row[-1]) for answer, row in zip(answers, rows, strict=True)
        ]
        assert scores["mse"] == pytest.approx(sum(error**2 for error in errors) / len(rows), abs=1e-6)
    elif kind in ("single", "pair"):
        right = [answer["predicted_label"] == row[-1] for answer, row in zip(answers, rows, strict=True)]
        assert scores["accuracy"] == pytest.approx(sum(right) / len(rows))
        assert sum(map(sum, scores["confusion"])) == len(rows)
    else:
        found = [
            set(filter(None, answer["predicted_labels"].replace(";", "|").split("|"))) for answer in answers
        ]
        if kind == "tags":
            truth = [set(filter(None, row[-1].split(";"))) for row in rows]
        else:
            truth = [
                {name for name, cell in zip(header[1:], row[1:], strict=True) if cell == "1"} for row in rows
            ]
        both = sum(len(one & other) for one, other in zip(found, truth, strict=True))
        assert scores["micro_f1"] == pytest.approx(2 * both / (sum(map(len, found)) + sum(map(len, truth))))


def test_the_scores_on_the_validation_data_are_those_of_the_run(tiny_model, finished, tmp_path):
    names, rows = ["text", "label"], [[text, "yes" if "good" in text else "no"] for text in TEXTS]
    check = write_csv(tmp_path / "check.csv", names, rows)
    result = snugtune.train(
        model=tiny_model, data=check, validation=check, epochs=1, output=tmp_path / "run", quiet=True
    )
    scores = snugtune.evaluate(tmp_path / "run", check, quiet=True)
    assert scores.keys() == result.metrics.keys()
    assert scores["loss"] == pytest.approx(result.metrics["loss"], abs=1e-5)
    assert scores["confusion"] == result.metrics["confusion"]


def test_a_label_that_was_not_learnt_is_named_with_its_row(finished, tmp_path):
    data = write_csv(tmp_path / "test.csv", ["text", "label"], [["good", "好评"], ["bad", "soso"]])
    with pytest.raises(DataError, match=r"test\.csv, row 2: the label 'soso' is not in the training data"):
        snugtune.evaluate(finished("single"), data)


def test_labels_can_be_in_other_columns(finished, tmp_path):
    rows = read_csv(finished("several").parent / "data.csv")[1:]
    data = write_csv(tmp_path / "test.csv", ["text", "L", "F"], rows)
    scores = snugtune.evaluate(finished("several"), data, label_column=["L", "F"], quiet=True)
    assert scores == snugtune.evaluate(
        finished("several"), finished("several").parent / "data.csv", quiet=True
    )
    listed = tmp_path / "test.jsonl"
    with listed.open("w") as file:
        for text, liked, film in rows:
            names = ["liked"] * (liked == "1") + ["film"] * (film == "1")
            file.write(json.dumps({"text": text, "all": names}) + "\n")
    assert snugtune.evaluate(finished("several"), listed, label_column="all", quiet=True) == scores


@pytest.mark.parametrize(
    ("kind", "labels", "part"),
    [
        ("several", "L", "one label for each row"),
        ("several", ["F", "L", "text2"], "3 label columns do not fit"),
        ("single", ["L", "F"], "it learnt from one"),
        ("single", None, "no column 'label'"),
    ],
)
def test_label_columns_that_do_not_fit_are_refused(finished, tmp_path, kind, labels, part):
    data = write_csv(
        tmp_path / "test.csv", ["text", "text2", "L", "F"], [["good", "x", 1, 0], ["bad", "y", 0, 1]]
    )
    with pytest.raises(UsageError, match=part):
        snugtune.evaluate(finished(kind), data, label_column=labels)


def test_a_run_that_was_moved_is_used_where_it_is(finished, tmp_path, monkeypatch):
    shutil.copytree(finished("single"), tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    assert_same(
        snugtune.predict("elsewhere", texts=TEXTS, quiet=True).answers,
        ask(finished("single"), "single").answers,
    )
