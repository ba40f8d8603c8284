"""Files that are not as they should be, read by finished models: the settings of training are there too."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import snugtune
from snugtune.cli import app
from snugtune.errors import DataError, UsageError

Ask = Callable[[str], Path]
ROWS = 'text,label\nthe good film,好评\nthe bad book\nthe bad film,"差评, no"\n'


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_rows_that_cannot_be_read_stop_or_are_left_out(finished: Ask, tmp_path: Path) -> None:
    data, output = write(tmp_path / "new.csv", ROWS), tmp_path / "answers.csv"
    with pytest.raises(DataError, match="line 3"):
        snugtune.predict(finished("single"), data=data, quiet=True)
    words = ["predict", str(finished("single")), "--data", str(data), "--output", str(output)]
    done = CliRunner().invoke(app, [*words, "--bad-rows", "skip"])
    assert done.exit_code == 0, done.output
    assert "3 rows read, 2 kept, 1 left out: line 3" in " ".join(done.output.split())
    with output.open(encoding="utf-8", newline="") as file:
        assert [row["text"] for row in csv.DictReader(file)] == ["the good film", "the bad film"]


def test_broken_lines_of_json_are_left_out_of_the_answers(finished: Ask, tmp_path: Path) -> None:
    good = [json.dumps({"text": text, "when": "2020-01-01"}) for text in ("the good film", "the bad book")]
    data = write(tmp_path / "new.jsonl", f"{good[0]}\nnot json\n{good[1]}\n")
    output = tmp_path / "answers.jsonl"
    snugtune.predict(finished("single"), data=data, output=output, bad_rows="skip", quiet=True)
    answers = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    assert [(a["text"], a["when"]) for a in answers] == [
        ("the good film", "2020-01-01"),
        ("the bad book", "2020-01-01"),
    ]


def test_rows_without_label_stop_an_evaluation_or_are_left_out(finished: Ask, tmp_path: Path) -> None:
    data = write(tmp_path / "test.csv", ROWS + "the good book,\n")
    with pytest.raises(DataError, match="line 3"):
        snugtune.evaluate(finished("single"), data, quiet=True)
    done = CliRunner().invoke(
        app, ["evaluate", str(finished("single")), "--data", str(data), "--bad-rows", "skip", "--json"]
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["rows"] == 2


def test_encoding_and_header_can_be_named(finished: Ask, tmp_path: Path) -> None:
    run = finished("single")
    data = write(tmp_path / "a.csv", "the good film,1\nthe bad book,2\n")
    asked = {"text_column": "column 1", "header": False}
    with pytest.raises(DataError, match="seems to be a row"):
        snugtune.predict(run, data=data, quiet=True)
    assert len(snugtune.predict(run, data=data, quiet=True, **asked).answers or []) == 2
    data = write(tmp_path / "b.csv", b"text,id\n\xff,1\n")
    with pytest.raises(DataError, match="not UTF-8"):
        snugtune.predict(run, data=data, quiet=True)
    assert snugtune.predict(run, data=data, encoding="cp1252", quiet=True).rows == 1


def test_settings_without_effect_or_sense_are_wrong_usage(finished: Ask, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--bad-rows has no effect on texts"):
        snugtune.predict(finished("single"), texts=["a"], bad_rows="skip")
    data = write(tmp_path / "new.csv", ROWS)
    with pytest.raises(UsageError, match="bad_rows cannot be 'no'"):
        snugtune.predict(finished("single"), data=data, bad_rows="no")
