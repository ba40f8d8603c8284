"""Kinds of faulty and of healthy files, each in several forms; what a careful person would want of each."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

import snugtune
from snugtune.data import plain_cells
from snugtune.data.look import DataCheck
from snugtune.data.plain_cells import Doubtful, plain_batches

Check = Callable[..., DataCheck]
TEXTS = ["a fine film", "a dull film", "a good book", "a bad book", "great fun", "no fun", "well made"]
TEXTS += ["badly made", "a lovely evening", "a lost evening", "clever and funny", "neither clever nor funny"]
ITEMS = [{"text": text, "label": number % 2} for number, text in enumerate(TEXTS)]
CHINESE = "text,label\n这部电影很好看,1\n剧情无聊,0\n服务态度不好,0\n非常满意,1\n"


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def look(name: str, content: str | bytes, **settings: Any) -> DataCheck:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return snugtune.check_data(path, set={f"data.{key}": value for key, value in settings.items()})

    return look


def cells(more: str = "", *, labels: tuple[str, str] = ("0", "1"), head: str = "text,label") -> str:
    """A healthy file of 12 rows, and more of them."""
    return f"{head}\n" + "".join(f"{text},{labels[n % 2]}\n" for n, text in enumerate(TEXTS)) + more


def lines(*more: str) -> str:
    return "".join(f"{line}\n" for line in [*map(json.dumps, ITEMS), *more])


HEALTHY = {
    "line ends of old Macs": ("a.csv", cells().replace("\n", "\r")),
    "Windows and other line ends": ("a.csv", cells().replace("\n", "\r\n", 4)),
    "names with spaces": ("a.csv", cells(head=" text , label ")),
    "names in capitals": ("a.csv", cells(head="Text,LABEL")),
    "quoted names": ("a.csv", cells(head='"text","label"')),
    "byte order mark": ("a.csv", "\ufeff" + cells()),
    "semicolons": ("a.csv", cells().replace(",", ";")),
    "tabs": ("a.csv", cells().replace(",", "\t")),
    "bars": ("a.csv", cells().replace(",", "|")),
    "a quote inside a cell": ("a.csv", cells('he said "hi" to me,1\n')),
    "quotes written twice": ("a.csv", cells('"he said ""hi"" to me",1\n"""",0\n')),
    "blank lines": ("a.csv", cells().replace("\n", "\n\n")),
    "an index": ("a.csv", cells(head=",text,label").replace("\n", "\n7,").removesuffix("7,")),
    "true and false": ("a.csv", cells(labels=("false", "True"))),
    "a mark inside": ("a.csv", cells("\ufeffx,1\n")),
    "gzipped": ("a.csv.gz", gzip.compress(cells().encode())),
    "Chinese, UTF-16-LE": ("a.csv", CHINESE.encode("utf-16-le")),
    "Chinese, UTF-16-BE": ("a.csv", CHINESE.encode("utf-16-be")),
    "JSON lines": ("a.jsonl", lines()),
    "JSON lines of Windows": ("a.jsonl", lines().replace("\n", "\r\n")),
    "JSON lines with blank ones": ("a.jsonl", lines().replace("\n", "\n\n")),
    "JSON lines with a mark": ("a.jsonl", "\ufeff" + lines()),
    "JSON lines, UTF-16": ("a.jsonl", lines().encode("utf-16")),
    "whole numbers with and without a point": ("a.jsonl", lines('{"text": "x", "label": 1.0}')),
    "a surrogate pair": ("a.jsonl", lines('{"text": "x \\ud83d\\ude00", "label": 1}')),
    "large whole numbers": (
        "a.jsonl",
        "".join(json.dumps({**item, "label": 10**20 + n % 2}) + "\n" for n, item in enumerate(ITEMS)),
    ),
    "a separator that Unicode knows and JSON does not": (
        "a.jsonl",
        lines('{"text": "a\u2028b", "label": 1}'),
    ),
    "a column that is empty": ("a.jsonl", lines().replace("}", ', "more": null}')),
    "a JSON list": ("a.json", json.dumps(ITEMS)),
    "a JSON list over many lines": ("a.json", json.dumps(ITEMS, indent=2)),
    "a JSON list by a wrong name": ("a.jsonl", json.dumps(ITEMS, indent=2)),
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_file_of_any_form_is_read_without_a_word(kind: str, check: Check) -> None:
    found = check(*HEALTHY[kind])
    assert (found.findings, found.refused, found.repaired) == ([], 0, 0)
    assert len(found.labels) == 2
    assert found.rows == sum(found.labels.values()) >= 4


# What is in the file, the lines for which a run stops, and a word that is said.
STOPPING: dict[str, tuple[str, str | bytes, list[int | None], str]] = {
    "zero bytes in the place of a row": ("a.csv", cells("\0\0\0\n"), [14], "1 cell"),
    "a text that begins with a quote": ("a.csv", cells('"hi" he said,1\n'), [14], "quotes"),
    "quotes written with backslashes": ("a.csv", cells('"he said \\"no\\"",1\n'), [14], "quotes"),
    "single quotes": ("a.csv", cells("'a, b',1\n"), [14], "3 cells"),
    "a quote that is never closed": ("a.csv", cells('"open,1\nm,0\n'), [14], "swallows"),
    "cells that are all empty": ("a.csv", cells(",\n,\n"), [14, 15], "no text"),
    "numbers with a decimal comma": (
        "a.csv",
        "text;score\n" + "".join(f"{text};{n},5\n" for n, text in enumerate(TEXTS)),
        [None],
        "decimal comma",
    ),
    "a comment above the names": ("a.csv", "# made by hand\n" + cells(), [2], "2 cells"),
    "a line of Excel above the names": ("a.csv", "sep=;\n" + cells().replace(",", ";"), [None], "sep="),
    "one row": ("a.csv", "text,label\na,1\n", [None], "only one class"),
    "one column": ("a.csv", "text\na\nb\n", [None], "which column"),
    "nothing but a page of errors": ("a.csv", "<!DOCTYPE html>\n<p>404, not found</p>\n", [2], "2 cells"),
    "an Excel file": ("a.csv", b"PK\x03\x04" + bytes(range(256)), [None], "Excel"),
    "a Parquet file called CSV": ("a.csv", b"PAR1" + bytes(range(256)), [None], ".parquet"),
    "gzipped without saying so": ("a.csv", gzip.compress(cells().encode()), [None], ".gz"),
    "not gzipped though it says so": ("a.csv.gz", cells(), [None], "not gzipped"),
    "half of a gzipped file": ("a.csv.gz", gzip.compress(cells().encode())[:-20], [None], "ended before"),
    "two objects in a line": ("a.jsonl", '{"text": "a", "label": 1}' + lines(), [1], "Extra data"),
    "a name that is there twice": ("a.jsonl", lines('{"text": "a", "text": "b", "label": 1}'), [13], "twice"),
    "NaN as a label": ("a.jsonl", lines('{"text": "x", "label": NaN}'), [13], "no label"),
    "NaN as a text": ("a.jsonl", lines('{"text": NaN, "label": 1}'), [13], "no text"),
    "Infinity as a label": ("a.jsonl", lines('{"text": "x", "label": -Infinity}'), [13], "-Infinity"),
    "an object as a text": ("a.jsonl", lines('{"text": {"a": "b"}, "label": 1}'), [13], "an object"),
    "a null in the place of an object": ("a.jsonl", lines("null"), [13], "null"),
    "a number in the place of an object": ("a.jsonl", lines("42"), [13], "a number"),
    "a line that is cut off": ("a.jsonl", lines()[:-12], [12], "cannot be used"),
    "a list for each line": ("a.jsonl", '["a", 1]\n["b", 0]\n', [1], "a list"),
    "an object over several lines": (
        "a.jsonl",
        json.dumps(ITEMS[0], indent=1),
        [1],
        "one JSON object per line",
    ),
    "texts that are objects": (
        "a.jsonl",
        "".join(json.dumps({"text": {"en": item["text"]}, "label": item["label"]}) + "\n" for item in ITEMS),
        [None],
        "does not hold texts",
    ),
    "columns in the place of rows": ("a.json", '{"text": ["a", "b"], "label": [1, 0]}', [None], "hold texts"),
    "rows under a name": ("a.json", json.dumps({"data": ITEMS}), [None], "which column"),
    "a comma before the end of a list": ("a.json", json.dumps(ITEMS)[:-1] + ",]", [1], "Expecting value"),
    "a list without an end": ("a.json", json.dumps(ITEMS)[:-1], [1], "Expecting ','"),
    "something after a list": ("a.json", json.dumps(ITEMS, indent=1) + "x", [50], "after the end"),
    "a word in a list": ("a.json", "[\n" + json.dumps(ITEMS[0]) + ',\n"x"\n]', [None, 3], "item 2"),
    "labels that are lists in one row": ("a.jsonl", lines('{"text": "x", "label": [1]}'), [13], "a list"),
    "bytes of another encoding": (
        "a.csv",
        cells("Gr\u00fc\u00dfe,1\n").encode("latin-1"),
        [14],
        "not UTF-8",
    ),
}


@pytest.mark.parametrize("kind", STOPPING)
def test_a_file_that_cannot_be_used_stops_with_its_lines(kind: str, check: Check) -> None:
    name, content, stops, word = STOPPING[kind]
    found = check(name, content)
    said = " ".join(f"{finding.what} {finding.why} {finding.do}" for finding in found.findings)
    assert [finding.line for finding in found.findings if finding.stops] == stops
    assert word in said
    assert found.stops


SAID: dict[str, tuple[str, str, dict[str, int], str]] = {
    "spaces around labels": ("a.csv", cells("x, 1\ny,1 \n"), {"0": 6, "1": 8}, "spaces around labels"),
    "a hard space after a label": ("a.csv", cells("x,1\u00a0\n"), {"0": 6, "1": 7}, "spaces around labels"),
    "an invisible sign": ("a.csv", cells("x,1\u200b\n"), {"0": 6, "1": 6, "1\u200b": 1}, "'1\\u200b'"),
    "a control sign": ("a.csv", cells("x,1\x1a"), {"0": 6, "1": 6, "1\x1a": 1}, "'1\\x1a'"),
    "quotes after a space": ("a.csv", cells('x, "1"\n'), {'"1"': 1, "0": 6, "1": 6}, "quotes"),
    "points": ("a.csv", cells("x,1.0\ny,0.\n"), {"0": 7, "1": 7}, "1.0 as 1"),
    "truth and numbers": ("a.csv", cells("x,True\ny,1\n"), {"0": 6, "1": 7, "True": 1}, "may mean the same"),
    "no label in words": ("a.csv", cells(labels=("NA", "yes")), {"NA": 6, "yes": 6}, "'NA'"),
    "not a number": ("a.csv", cells("x,nan\ny,nan\n"), {"0": 6, "1": 6, "nan": 2}, "'nan'"),
    "a number that is too large": (
        "a.jsonl",
        lines('{"text": "x", "label": 1e999}'),
        {"0": 6, "1": 6, "inf": 1},
        "'inf'",
    ),
    "amounts, except a word": (
        "a.csv",
        cells("x,n/a\nz,n/a\n", labels=("0.5", "1.5")) + "u,2.5\nv,2.5\n",
        {"0.5": 6, "1.5": 6, "2.5": 2, "n/a": 2},
        "except 'n/a'",
    ),
    "half of a surrogate pair": (
        "a.jsonl",
        lines('{"text": "x\\ud800", "label": 1}'),
        {"0": 6, "1": 7},
        "damage",
    ),
    "a zero byte": ("a.csv", cells("a\0b,1\n"), {"0": 6, "1": 7}, "damage"),
    "a truth among numbers": (
        "a.jsonl",
        lines('{"text": "x", "label": true}'),
        {"0": 6, "1": 6, "true": 1},
        "made texts in 'label'",
    ),
}


@pytest.mark.parametrize("kind", SAID)
def test_what_is_doubtful_is_said_and_does_not_stop(kind: str, check: Check) -> None:
    name, content, labels, word = SAID[kind]
    found = check(name, content)
    assert found.labels == labels
    assert any(word in f"{finding.what} {finding.why}" for finding in found.findings)
    assert not found.stops


@pytest.mark.parametrize("name", ["a.arrow", "a.feather", "a.parquet"])
def test_tables_of_programs_are_read(name: str, tmp_path: Path, check: Check) -> None:
    import pyarrow as pa
    from pyarrow import feather, parquet

    table = pa.Table.from_pylist(ITEMS)
    if name == "a.arrow":
        with pa.OSFile(str(tmp_path / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    else:
        (feather.write_feather if name == "a.feather" else parquet.write_table)(table, str(tmp_path / name))
    found = snugtune.check_data(tmp_path / name)
    assert (found.findings, found.labels) == ([], {"0": 6, "1": 6})


def test_texts_of_parquet_that_are_no_texts_stop(tmp_path: Path, check: Check) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    texts = pa.array([b"caf\xe9", b"ok"], pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"text": texts, "label": [0, 1]}), str(tmp_path / "a.parquet"))
    found = snugtune.check_data(tmp_path / "a.parquet")
    assert found.stops
    assert "UTF8" in found.findings[0].why


def test_a_list_is_read_in_blocks(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    from snugtune.data import json_items

    for characters in (1, 7, 64):
        monkeypatch.setattr(json_items, "_BLOCK_CHARACTERS", characters)
        items = [*ITEMS, {"text": "", "label": 1}]
        found = check("a.json", json.dumps(items, indent=1) + "\n")
        assert [finding.line for finding in found.findings] == [50]
        assert found.rows == 13


@pytest.mark.parametrize("block_bytes", [5, 16, 1 << 20])
def test_the_fast_reader_understands_blocks_like_one_file(
    block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_cells, "_BLOCK_BYTES", block_bytes)
    path = tmp_path / "a.csv"
    path.write_bytes('\ufefftext,label\r\n"two\nlines, ""and"" more",1\n\nplain,"0"\nlast,1'.encode())
    batches = plain_batches(path, delimiter=",", names=["text", "label"], header=True)
    rows = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
    assert rows == [('two\nlines, "and" more', "1"), ("plain", "0"), ("last", "1")]


@pytest.mark.parametrize(
    "row", ['"open,1', 'a "quote",1', '"a" b,1', "a,1,2", "a", "a\0,1", ' "a",1', '"a"" ,1', "  "]
)
def test_the_fast_reader_leaves_every_doubt_to_the_other(row: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(f"text,label\nfine,1\n{row}\nfine,0\n".encode())
    with pytest.raises(Doubtful):
        list(plain_batches(path, delimiter=",", names=["text", "label"], header=True))


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json"])
def test_memory_does_not_grow_with_the_texts(name: str, tmp_path: Path) -> None:
    """C127, in small: what Arrow holds at its peak is a few blocks, however long the file."""
    rows = 120_000
    texts = [f"{number} " + "word " * 20 for number in range(rows)]
    items = [json.dumps({"text": text, "label": n % 2}) for n, text in enumerate(texts)]
    content = {
        "a.csv": "text,label\n" + "".join(f"{text},{n % 2}\n" for n, text in enumerate(texts)),
        "a.jsonl": "\n".join(items),
        "a.json": "[" + ",\n".join(items) + "]",
    }
    (tmp_path / name).write_text(content[name], encoding="utf-8")
    code = f"""
import pyarrow as pa, snugtune
print(snugtune.check_data({str(tmp_path / name)!r}).rows, pa.default_memory_pool().max_memory())
"""
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment)
    found, peak_bytes = map(int, done.stdout.split())
    assert found == rows
    assert peak_bytes < 40 * 2**20


@pytest.mark.parametrize("content", ["text,label\na,1\nb,0\n", "text,label\na,1\na,0\n"])
def test_rows_that_are_too_few_to_set_some_aside_are_no_fault_of_the_file(content: str, check: Check) -> None:
    found = check("a.csv", content)
    assert (found.stops, found.needs_validation) == (False, True)
    assert "too few to set some aside" in found.findings[0].what
    assert found.lines()[-1] == "a run would start, given --validation"


def test_one_quote_too_many_in_a_large_file_is_found_out_soon(tmp_path):
    """No line after it ends outside of quotes; to count them anew for each line would take hours."""
    path = tmp_path / "a.csv"
    path.write_bytes(b'text,label\na 5" screen,1\n' + b"a plain text,0\n" * 1_000_000)
    with pytest.raises(Doubtful):
        list(plain_batches(path, delimiter=",", names=["text", "label"], header=True))


@given(lines=st.lists(st.text('a"', max_size=6), max_size=12), block_bytes=st.integers(1, 9))
def test_blocks_end_with_lines_and_where_no_quote_is_open(lines, block_bytes):
    content = "\n".join(lines).encode()
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(plain_cells, "_BLOCK_BYTES", block_bytes):
        path = Path(folder, "a.csv")
        path.write_bytes(content)
        blocks = list(plain_cells.whole_rows(path, lambda done: None))
    assert b"".join(blocks) == content
    for block in blocks[:-1]:
        assert block.endswith(b"\n")
        assert block.count(b'"') % 2 == 0
