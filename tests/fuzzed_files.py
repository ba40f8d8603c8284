"""Files that are nearly right: tables as people write them, and then damaged, from a seed."""

from __future__ import annotations

import gzip
import json
import random

_CELLS = [
    *(
        "good",
        "bad",
        "",
        " ",
        "NA",
        "null",
        "1",
        "0",
        "1.0",
        "-1",
        "01",
        "true",
        "nan",
        "很好",
        "naïve",
        "🙂",
        "\u200b",
    ),
    *(
        'he said "no"',
        "a, b",
        "a; b",
        "two\nlines",
        "tab\there",
        '"',
        '""',
        "'",
        "\\",
        "\0",
        "\ufeff",
        "\ufffd",
        "x" * 5000,
    ),
    *("2020-01-01", "1e999", "9" * 400, "{", "[", "\r", "\x85", "\u2028", "\x1a", "=1+1"),
]
_VALUES = [
    None,
    True,
    0,
    1.5,
    10**30,
    -1,
    [],
    ["a"],
    [1, "a", None],
    {},
    {"a": {"b": []}},
    "good",
    "",
    " ",
    "\ud800",
]
_ENCODINGS = ["utf-8"] * 4 + [
    "utf-8-sig",
    "utf-16",
    "utf-16-le",
    "utf-32",
    "gb18030",
    "big5",
    "cp1252",
    "shift_jis",
]
_PIECES = [
    b'"',
    b",",
    b";",
    b"\t",
    b"\n",
    b"\r",
    b"\r\n",
    b"\0",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"{",
    b"}",
    b"[",
]
_PIECES += [
    b"]",
    b"\\",
    b"\x1f\x8b",
    b"NaN",
    b"1e5",
    b"null",
    b"\x80" * 9,
    b'""',
    b"\n\n\n",
    b"[" * 3000,
    b'{"a":' * 500,
]


KINDS = ("cells", "lines", "list", "parquet", "arrow")


def fuzzed_file(kind: str, seed: int) -> tuple[str, bytes]:
    """A name and what is in the file.

    Args:
        kind: One of `KINDS`: cells, JSON lines, a JSON list, or one of the formats for programs.
        seed: The same seed gives the same file.
    """
    source = random.Random(f"{kind} {seed}")
    if kind in ("parquet", "arrow"):
        name, content = f"a.{kind}", _binary(kind, source)
    else:
        text = _cells(source) if kind == "cells" else _json(source, as_list=kind == "list")
        content = text.encode(source.choice(_ENCODINGS), errors="replace")
        name = source.choice(["a.csv", "a.tsv"] if kind == "cells" else ["a.jsonl", "a.json"])
    for _ in range(source.choice([0, 0, 1, 1, 2, 5])):
        content = _damaged(content, source)
    if kind in ("cells", "lines", "list") and source.random() < 0.1:
        name, content = f"{name}.gz", gzip.compress(content)
        content = _damaged(content, source) if source.random() < 0.5 else content
    return name, content


def _binary(kind: str, source: random.Random) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    plain, strange = _plain_rows(source), source.randrange(9)
    rows = len(plain) + strange
    cells = [*(row["text"] for row in plain), *(source.choice([*_CELLS, None]) for _ in range(strange))]
    texts = pa.array(cells, pa.string())
    labels = source.choice(
        [
            pa.array([source.choice(["a", "b"]) for _ in range(rows)]),
            pa.array([source.choice([0, 1, None]) for _ in range(rows)], pa.int64()),
            pa.array([source.random() for _ in range(rows)], pa.float32()),
            pa.array(
                [source.choice([["a"], ["a", "b"], [], None]) for _ in range(rows)], pa.list_(pa.string())
            ),
            pa.array([True] * rows),
        ]
    )
    table, sink = pa.table({"text": texts, "label": labels}), pa.BufferOutputStream()
    if kind == "parquet":
        parquet.write_table(table, sink, compression=source.choice(["none", "snappy"]))
    else:
        new = source.choice([pa.ipc.new_file, pa.ipc.new_stream])
        with new(sink, table.schema) as writer:
            writer.write_table(table)
    return bytes(sink.getvalue())


def _cells(source: random.Random) -> str:
    delimiter, end = source.choice([",", ",", ";", "\t", "|"]), source.choice(["\n", "\r\n", "\r"])
    names = source.choice(
        [["text", "label"], ["label", "text", "id"], ["a", "b"], ["text", "text", "label"], ["text"]]
    )
    rows = [names] if source.random() < 0.8 else []
    rows += [[row.get(name, "more") for name in names] for row in _plain_rows(source)]
    for _ in range(source.randrange(9)):
        width = len(names) if source.random() < 0.9 else source.randrange(5)
        rows.append([source.choice(_CELLS) for _ in range(width)])
    return end.join(delimiter.join(_quoted(cell, delimiter, source) for cell in row) for row in rows) + end


def _plain_rows(source: random.Random) -> list[dict[str, str]]:
    """In half of the files: enough rows without fault that a run is not stopped for having too few."""
    count = source.choice([0, source.randrange(20, 60)])
    return [
        {"text": f"plain words {row}", "label": source.choice(["good", "bad"]), "id": f"{row}"}
        for row in range(count)
    ]


def _quoted(cell: str, delimiter: str, source: random.Random) -> str:
    needed = bool(set(cell) & {delimiter, '"', "\n", "\r"})
    if needed != (source.random() < 0.05):
        return '"' + cell.replace('"', '""') + '"'
    return cell


def _json(source: random.Random, *, as_list: bool) -> str:
    rows: list[dict[str, object]] = [*_plain_rows(source)]
    for _ in range(source.randrange(9)):
        row: dict[str, object] = {"text": source.choice(_CELLS), "label": source.choice(["a", "b", 0, 1])}
        if source.random() < 0.3:
            row[source.choice(["text", "label", "more", ""])] = source.choice(_VALUES)
        rows.append(row)
    if as_list:
        return json.dumps(rows, indent=source.choice([None, 1]), ensure_ascii=source.random() < 0.5)
    ascii_only = source.random() < 0.5
    return "".join(
        json.dumps(row, ensure_ascii=ascii_only) + source.choice(["\n", "\r\n", "\n\n"]) for row in rows
    )


def _damaged(content: bytes, source: random.Random) -> bytes:
    start = source.randrange(len(content) + 1)
    end = min(len(content), start + source.randrange(20))
    match source.randrange(5):
        case 0:
            return content[:start] + content[end:]
        case 1:
            return content[:start] + source.choice(_PIECES) + content[start:]
        case 2:
            return content[:start]
        case 3:
            return content[:end] + content[start:]
        case _:
            return content[:start] + bytes([source.randrange(256)]) + content[start + 1 :]
