"""Real files of every kind, whole and broken."""

from __future__ import annotations

import gzip
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from snugtune.data.columns import Columns, find_columns
from snugtune.data.readers import read_table
from snugtune.errors import DataError, SnugtuneError, UsageError

ROWS = [
    {"text": 'Good, "really"\nwith a second line', "label": "NA"},
    {"text": "这部电影很好看", "label": "null"},
    {"text": "", "label": "01"},
    {"text": " spaces kept ", "label": "None"},
    {"text": "1.0", "label": "1.0"},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, so that no test finds what another one has read."""
    import datasets

    folder = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    return folder


def delimited(delimiter: str, newline: str = "\n") -> bytes:
    def cell(value: str) -> str:
        return '"' + value.replace('"', '""') + '"' if set(value) & set(f'{delimiter}"\n') else value

    lines = [("text", "label"), *(tuple(row.values()) for row in ROWS)]
    return newline.join(delimiter.join(map(cell, line)) for line in lines).encode()


def lines() -> bytes:
    return "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()


def save_parquet(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(ROWS), path)


def save_folder(path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list(ROWS).save_to_disk(path)


def save_folder_of_splits(path: Path) -> None:
    from datasets import Dataset, DatasetDict

    DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS[:1])).save_to_disk(path)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "a.csv": lambda path: path.write_bytes(delimited(",")),
    "no BOM, CRLF.CSV": lambda path: path.write_bytes(delimited(",", "\r\n") + b"\r\n"),
    "BOM.csv": lambda path: path.write_bytes(b"\xef\xbb\xbf" + delimited(",")),
    "UTF-16.csv": lambda path: path.write_bytes(delimited(",").decode().encode("utf-16")),
    "GBK.csv.gz": lambda path: path.write_bytes(gzip.compress(delimited(",").decode().encode("gbk"))),
    "semicolons.csv": lambda path: path.write_bytes(delimited(";")),
    "tabs.csv": lambda path: path.write_bytes(delimited("\t")),
    "commas.tsv": lambda path: path.write_bytes(delimited(",", "\r\n")),
    "UTF-16.jsonl": lambda path: path.write_bytes(lines().decode().encode("utf-16")),
    "blank lines.csv": lambda path: path.write_bytes(b"\n" + delimited(",") + b"\n   \n\n"),
    "a.csv.gz": lambda path: path.write_bytes(gzip.compress(delimited(","))),
    "a.tsv": lambda path: path.write_bytes(delimited("\t")),
    "a.jsonl": lambda path: path.write_bytes(lines()),
    "BOM.jsonl": lambda path: path.write_bytes(b"\xef\xbb\xbf" + lines()),
    "a.ndjson": lambda path: path.write_bytes(lines() + b"\n"),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines())),
    "list.json": lambda path: path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8"),
    "lines.json": lambda path: path.write_bytes(lines()),
    "a.parquet": save_parquet,
    "pattern [0-9]*.csv": lambda path: path.write_bytes(delimited(",")),
    ".hidden.csv": lambda path: path.write_bytes(delimited(",")),
    "folder": save_folder,
    "folder of splits": save_folder_of_splits,
}


@pytest.mark.parametrize("name", list(WRITERS))
def test_every_format_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    assert read_table(tmp_path / name).to_list() == ROWS


def test_a_split_is_chosen_by_name(tmp_path: Path) -> None:
    save_folder_of_splits(tmp_path / "both")
    assert len(read_table(tmp_path / "both", split="test")) == 1
    with pytest.raises(DataError, match="its splits are train, test"):
        read_table(tmp_path / "both", split="validation")


def test_a_split_of_a_single_table_is_refused(tmp_path: Path) -> None:
    WRITERS["a.csv"](tmp_path / "a.csv")
    assert len(read_table(tmp_path / "a.csv", split="train")) == len(ROWS)
    with pytest.raises(UsageError, match="'test'"):
        read_table(tmp_path / "a.csv", split="test")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\na,1\n", encoding="utf-8")
    assert len(read_table(path)) == 1
    path.write_text("text,label\na,1\nb,2\n", encoding="utf-8")
    assert len(read_table(path)) == 2


def test_a_large_file_stays_on_disk(tmp_path: Path) -> None:
    import pyarrow as pa

    path = tmp_path / "large.csv"
    with path.open("w", encoding="utf-8") as file:
        file.write("text,label\n")
        file.writelines(f"this is the text number {row} of many,{row % 5}\n" for row in range(300_000))
    before = pa.total_allocated_bytes()
    table = read_table(path)
    assert len(table) == 300_000
    assert table[299_999] == {"text": "this is the text number 299999 of many", "label": "4"}
    assert table.cache_files
    assert pa.total_allocated_bytes() - before < path.stat().st_size / 10


def test_a_cell_longer_than_the_usual_limit_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"text,label\n{'long ' * 100_000},1\n", encoding="utf-8")
    assert len(read_table(tmp_path / "a.csv")[0]["text"]) == 500_000


BROKEN = {
    "a cell too many": ("a.csv", b"text,label\na,1\nb,2,3\n", ["line 3", "3 cells", "2"]),
    "a cell too many everywhere": ("a.csv", b"text,label\na,1,2\nb,2,3\n", ["line 2", "3 cells"]),
    "a cell missing": ("a.csv", b'text,label\n"a\nb",1\nb\n', ["line 4", "1 cell,"]),
    "a quote left open": ("a.csv", b'text,label\nx,0\n"a,1\nb,2\n', ["line 3", "quote"]),
    "a quote inside": ("a.csv", b'text,label\n"Great" film,1\n', ["line 2", "quote"]),
    "only a header": ("a.csv", b"text,label\n", ["no rows"]),
    "nothing": ("a.csv", b"", ["no rows"]),
    "only line ends": ("a.csv", b"\n\n\n", ["no rows"]),
    "not gzip": ("a.csv.gz", b"text,label\na,1\n", ["gzip"]),
    "a broken line": ("a.jsonl", b'{"text": "a"}\n\n{"text": "b"\n{"text": "c"}\n', ["line 3", "column"]),
    "null alone": ("a.json", b"null\n", ["line 1", "null"]),
    "null in lines": ("a.jsonl", b"null\n", ["line 1", "null"]),
    "null in a list": ("a.json", b'[{"text": "a"}, null]', ["item 2", "null"]),
    "a list of texts": ("a.json", b'["a", "b"]', ["item 1", "a text"]),
    "not an object": ("a.jsonl", b'{"text": "a"}\n[1]\n', ["line 2", "list"]),
    "a broken list": ("a.json", b'[{"text": "a"},\n {"text": "b"}\n {"text": "c"}]\n', ["line 3", "column"]),
    "an empty list": ("a.json", b"[]", ["no rows"]),
    "an empty first line only": ("a.jsonl", b"\n", ["no rows"]),
    "bytes in JSON": ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', ["line 2", "byte offset 24", "0xff"]),
    "not Parquet": ("a.parquet", b"text,label\na,1\n", ["could not be read", "arquet"]),
    "another kind": ("a.xlsx", b"PK", [".xlsx", ".csv"]),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_a_broken_file_is_named_with_its_place(case: str, tmp_path: Path) -> None:
    name, content, parts = BROKEN[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_table(tmp_path / name)
    assert [part for part in [name, *parts] if part not in str(caught.value)] == [], str(caught.value)


def test_an_unnamed_column_is_kept_and_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b",text, label\n0,a,x\n1,b,y\n")
    assert read_table(tmp_path / "a.csv").column_names == ["Unnamed: 0", "text", "label"]


def test_a_missing_file_gets_its_near_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reviews.csv").write_text("text,label\na,1\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for source in (tmp_path / "review.csv", "./review.csv", "review.csv"):
        with pytest.raises(DataError, match=r"did you mean reviews\.csv\?"):
            read_table(source)
    with pytest.raises(DataError, match="there is no folder"):
        read_table("nowhere/at/all.csv")


def test_a_folder_of_files_says_which_files(tmp_path: Path) -> None:
    WRITERS["a.csv"](tmp_path / "a.csv")
    with pytest.raises(DataError, match=r"a\.csv"):
        read_table(tmp_path)


def test_an_unwritable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    WRITERS["a.csv"](tmp_path / "a.csv")
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file" / "below")
    with pytest.raises(DataError, match="HF_HOME"):
        read_table(tmp_path / "a.csv")


def test_reading_prints_nothing_and_restores_the_settings(tmp_path: Path) -> None:
    WRITERS["a.jsonl"](tmp_path / "a.jsonl")
    code = f"""
import datasets
from snugtune.data.readers import read_table
before = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
read_table({str(tmp_path / "a.jsonl")!r})
assert (datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()) == before
"""
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_settings_are_restored_after_an_error(tmp_path: Path) -> None:
    import datasets

    (tmp_path / "a.parquet").write_bytes(b"no")
    before = datasets.are_progress_bars_disabled(), logging.getLogger("datasets").level
    with pytest.raises(DataError):
        read_table(tmp_path / "a.parquet")
    assert (datasets.are_progress_bars_disabled(), logging.getLogger("datasets").level) == before


def test_a_hub_id_goes_to_the_hub() -> None:
    with pytest.raises(SnugtuneError) as caught:
        read_table("owner/reviews")
    assert type(caught.value).__name__ == "HubError"
    assert "the data set 'owner/reviews'" in str(caught.value)


def columns(names: str, **asked: Any) -> Columns:
    return find_columns(
        names.split(), **{"text": None, "text_pair": None, "labels": None, **asked}, where="reviews.csv"
    )


@pytest.mark.parametrize(
    ("names", "text", "pair", "labels"),
    [
        ("id text label", "text", None, ["label"]),
        ("label content text", "text", None, ["label"]),
        ("Category REVIEW x", "REVIEW", None, ["Category"]),
        ("评论 情感 编号", "评论", None, ["情感"]),
        ("body label", "body", None, ["label"]),
        ("text topic", "text", None, ["topic"]),
        ("sentence1 sentence2 label idx", "sentence1", "sentence2", ["label"]),
        ("question sentence label idx", "question", "sentence", ["label"]),
        ("premise hypothesis text label", "text", None, ["label"]),
    ],
)
def test_usual_names_are_found(names: str, text: str, pair: str | None, labels: list[str]) -> None:
    assert columns(names) == Columns(text=text, text_pair=pair, labels=tuple(labels))


def test_named_columns_win() -> None:
    found = columns("text label a b c", text="a", text_pair="b", labels=["c", "label"])
    assert found == Columns(text="a", text_pair="b", labels=("c", "label"))


@pytest.mark.parametrize(
    ("names", "asked", "parts"),
    [
        ("a b c", {}, ["a, b, c", "--text-column (data.text_column)"]),
        ("text b c", {}, ["text, b, c", "--label-column (data.label_column)"]),
        ("text label", {"text": "Txet"}, ["'Txet'", "did you mean 'text'", "data.text_column"]),
        ("text label", {"labels": ["labl"]}, ["'labl'", "did you mean 'label'", "data.label_column"]),
        ("text label", {"text_pair": "other"}, ["'other'", "data.text_pair_column"]),
        ("text label", {"text": "label", "labels": ["label"]}, ["used twice"]),
    ],
)
def test_undecidable_columns_are_listed(names: str, asked: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        columns(names, **asked)
    assert [part for part in ["reviews.csv", *parts] if part not in str(caught.value)] == [], str(
        caught.value
    )


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_a_folder_with_the_signs_of_patterns_is_a_folder(tmp_path, monkeypatch, name):
    folder = tmp_path / "a [1] *"
    folder.mkdir()
    if name.endswith("parquet"):
        from datasets import Dataset

        Dataset.from_dict({"text": ["x"]}).to_parquet(str(folder / name))
    else:
        (folder / name).write_text('{"text": "x"}\n' if name.endswith("l") else "text\nx\n")
    monkeypatch.chdir(folder)
    assert read_table(name)["text"][:] == ["x"]
    assert read_table(folder / name)["text"][:] == ["x"]
