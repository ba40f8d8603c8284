"""Written tables: columns, order and cells as they were read, and the answers after them."""

from __future__ import annotations

import csv
import json
import os
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snugtune.data.readers import cells_as_written, read_table
from snugtune.data.writers import check_output, free_names, open_output, open_standard_output
from snugtune.errors import DataError, UsageError


def copy(source: Path, output: Path, part_rows: int = 2) -> None:
    """Copy a table in parts, with a column `answer` of row numbers."""
    table = read_table(source).with_format("arrow")
    with open_output(output, source=source, rows=cells_as_written(source)) as write:
        for start in range(0, len(table), part_rows):
            part = table[start : start + part_rows]
            write(part, pa.table({"answer": [start + row for row in range(len(part))]}))


def read_csv(path: Path, delimiter: str = ",") -> list[list[str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return [row for row in csv.reader(file, delimiter=delimiter) if row]


ODD = 'text,"a ""q""",n\r\n"x\r\ny, ""z""\ty", 007,NA\n"l\rm",, \r\n\r\n好看😀,1.50,"\'\\n"\r\n'


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize(("name", "delimiter"), [("out.csv", ","), ("out.tsv", "\t")])
def test_every_cell_of_a_csv_file_stays_as_it_is(tmp_path, mark, name, delimiter):
    source = tmp_path / "in.csv"
    source.write_bytes((mark + ODD).encode())
    copy(source, tmp_path / name)
    before, after = read_csv(source), read_csv(tmp_path / name, delimiter)
    assert before[1] == ['x\r\ny, "z"\ty', " 007", "NA"]
    assert after == [[*row, extra] for row, extra in zip(before, ["answer", "0", "1", "2"], strict=True)]
    assert (tmp_path / name).read_bytes().startswith(b"\xef\xbb\xbf") == bool(mark)
    assert not list(tmp_path.glob("*.part"))
    again = read_table(tmp_path / name)
    assert [again[row]["text"] for row in range(3)] == [row[0] for row in before[1:]]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cells=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1))
def test_any_text_can_be_read_again(tmp_path, cells):
    part = pa.table({"id": list(range(len(cells))), "text": cells})
    with open_output(tmp_path / "any.csv") as write:
        write(part, pa.table({"answer": cells}))
    assert read_csv(tmp_path / "any.csv")[1:] == [[str(i), cell, cell] for i, cell in enumerate(cells)]


JSON_ROWS = [
    {
        "text": "a",
        "when": "2024-01-01 00:00:00",
        "n": 12345678901234567890,
        "deep": {"x": [1, None]},
        "yes": True,
    },
    {"text": "b\nc", "when": "2024-01-02T10:00:00", "n": 3, "deep": {"y": "é"}, "yes": None},
    {"text": "d", "when": "2024-01-03", "n": 4, "deep": {}},
]


@pytest.mark.parametrize("name", ["in.jsonl", "in.json"])
def test_json_stays_as_it_is_also_where_the_reader_makes_times_of_texts(tmp_path, name):
    lines = [json.dumps(row) for row in JSON_ROWS]
    text = "\n\n".join(lines) if name == "in.jsonl" else f"[{','.join(lines)}]"
    (tmp_path / name).write_text(text)
    copy(tmp_path / name, tmp_path / "out.jsonl")
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert found == [{**row, "answer": number} for number, row in enumerate(JSON_ROWS)]
    copy(tmp_path / name, tmp_path / "out.csv")
    header, first, _, last = read_csv(tmp_path / "out.csv")
    assert header == ["text", "when", "n", "deep", "yes", "answer"]
    assert first == ["a", "2024-01-01 00:00:00", "12345678901234567890", '{"x": [1, null]}', "true", "0"]
    assert last == ["d", "2024-01-03", "4", "{}", "", "2"]


def test_parquet_keeps_the_types_and_the_other_formats_write_them_out(tmp_path):
    table = pa.table(
        {
            "text": ["a", None, "c"],
            "x": [1.5, float("nan"), 2.0],
            "when": [datetime(2024, 1, 2, 3), None, None],
            "tags": pa.array([["a", "b"], [], None]),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    copy(tmp_path / "in.parquet", tmp_path / "out.parquet")
    found = pq.read_table(tmp_path / "out.parquet")
    assert found.schema.remove_metadata() == table.schema.append(pa.field("answer", pa.int64()))
    assert found.column("answer").to_pylist() == [0, 1, 2]
    assert found.drop_columns(["answer", "x"]).to_pylist() == table.drop_columns(["x"]).to_pylist()
    assert read_table(tmp_path / "out.parquet").column_names == ["text", "x", "when", "tags", "answer"]
    copy(tmp_path / "in.parquet", tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert lines[0] == {"text": "a", "x": 1.5, "when": "2024-01-02 03:00:00", "tags": ["a", "b"], "answer": 0}
    assert lines[1] == {"text": None, "x": None, "when": None, "tags": [], "answer": 1}
    copy(tmp_path / "in.parquet", tmp_path / "out.csv")
    assert read_csv(tmp_path / "out.csv")[1] == ["a", "1.5", "2024-01-02 03:00:00", '["a", "b"]', "0"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, DataError("a", why="b", do="c")])
@pytest.mark.parametrize("name", ["out.csv", "out.jsonl", "out.parquet"])
def test_nothing_half_written_is_left_under_the_name(tmp_path, name, stop):
    part, answers = pa.table({"text": ["a"]}), pa.table({"answer": [1]})

    def write_and_stop() -> None:
        with open_output(tmp_path / name) as write:
            write(part, answers)
            assert [path.name for path in tmp_path.iterdir()] == [f"{name}.part"]
            raise stop

    with pytest.raises((KeyboardInterrupt, DataError)):
        write_and_stop()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / name).write_text("before")
    with pytest.raises((KeyboardInterrupt, DataError)):
        write_and_stop_keeping(tmp_path / name, part, answers, stop)
    assert (tmp_path / name).read_text() == "before"


def write_and_stop_keeping(output, part, answers, stop) -> None:
    with open_output(output) as write:
        write(part, answers)
        raise stop


def test_a_disk_that_is_full_is_an_error_with_words(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "open", lambda *a, **k: open("/dev/full", "wb"))  # noqa: PTH123, SIM115
    with pytest.raises(DataError, match="No space left"), open_output(tmp_path / "out.csv") as write:
        write(pa.table({"text": ["a" * 100_000]}), pa.table({"answer": [1]}))


def test_parquet_that_cannot_hold_a_type_says_so(tmp_path):
    part = pa.table({"text": ["a"], "x": pa.array([{}], pa.struct([]))})
    with (
        pytest.raises(DataError, match=r"cannot write .*out\.parquet"),
        open_output(tmp_path / "out.parquet") as write,
    ):
        write(part, pa.table({"answer": [1]}))
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_should_not_be_written_is_refused(tmp_path):
    source, other = tmp_path / "in.csv", tmp_path / "other.csv"
    source.write_text("text\na\n")
    other.write_text("mine")
    (tmp_path / "link.csv").symlink_to(source)
    (tmp_path / "folder.csv").mkdir()
    for name, part in [
        ("in.csv", "the very file"),
        ("link.csv", "the very file"),
        ("folder.csv", "is a folder"),
        ("none/out.csv", "there is no folder"),
        ("out.xlsx", "ends in .xlsx"),
        ("out", "ends in nothing"),
    ]:
        with pytest.raises(UsageError, match=part):
            check_output(tmp_path / name, source=source, overwrite=True)
    with pytest.raises(UsageError, match="--overwrite"):
        check_output(other, source=source, overwrite=False)
    check_output(other, source=source, overwrite=True)
    check_output(tmp_path / "new.PARQUET", source="owner/reviews", overwrite=False)


def test_free_names_have_the_same_number():
    assert free_names(["a", "b"], ["x"]) == ["a", "b"]
    assert free_names(["a", "b"], ["b", "a_2"]) == ["a_3", "b_3"]


@pytest.mark.parametrize(("kind", "text"), [(".csv", "t,n\n好,1\n"), (".jsonl", '{"t": "好", "n": 1}\n')])
def test_the_standard_output_is_utf8_whatever_the_locale(capfdbinary, kind, text):
    with open_standard_output(kind) as write:
        write(pa.table({"t": ["好"]}), pa.table({"n": [1]}))
    assert capfdbinary.readouterr().out.decode() == text


def print_something() -> None:
    with open_standard_output(".csv") as write:
        write(pa.table({"t": ["a" * 100_000]}), pa.table({"n": [1]}))


def test_a_standard_output_that_cannot_be_written_is_an_error_with_words(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    with pytest.raises(DataError, match="it is closed"):
        print_something()
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        with pytest.raises(DataError, match="No space left"):
            print_something()
        full.write("what Python still has when it ends")  # goes nowhere, and does not fail


def test_a_reader_that_goes_away_is_no_error(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        print_something()
        pipe.write("what Python still has when it ends")
