"""Small files of the kinds that cost people days: exit code, facts and lines of `check-data FILE --json`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

T = "text,label\n"
CHINESE = T + "外观很好，推荐,1\n声音太小,0\n物流快，包装好,1\n屏幕坏了,0\n值得买,1\n态度差,0\n"
GOOD = T + "".join(f"a fine day {n},1\na dull day {n},0\n" for n in range(8))
OBJECT = '{{"text": "{}", "label": {}}}\n'.format

# case: name, content, exit code, rows, kept, lines for which it stops or warns, facts
SAMPLES: dict[str, tuple[str, str | bytes, int, int, int, list[int], dict[str, Any]]] = {
    "baseline": ("a.csv", GOOD, 0, 16, 16, [], {"findings": []}),
    "C070": ("a.csv", GOOD.encode("utf-8-sig"), 0, 16, 16, [], {"encoding": "utf-8-sig", "findings": []}),
    "C071 gbk": ("a.csv", CHINESE.encode("gbk"), 0, 6, 6, [], {"encoding": "gb18030"}),
    "C071 utf-8": ("a.csv", CHINESE, 0, 6, 6, [], {"encoding": "utf-8"}),
    "C071 cp1252": (
        "a.csv",
        (T + "café “nice”,1\nnaïve — no,0\n").encode("cp1252"),
        0,
        2,
        2,
        [],
        {"encoding": "cp1252"},
    ),
    "C073": ("a.csv", T + '"one\ntwo, three",1\n"so ""good""\n\nhe left",0\nflat,1\n', 0, 3, 3, [], {}),
    "C074": ("a.csv", "text,label\r\na,1\nb,0\r\nc,1\n", 0, 3, 3, [], {"labels": {"0": 1, "1": 2}}),
    "C075": ("a.csv", T + "word " * 30_000 + ",1\nshort,0\n", 0, 2, 2, [2], {}),
    "C076": ("a.csv", T + "NA,1\nnull,0\nNone,1\nnan,0\nN/A,1\nok,0\n,1\n", 1, 7, 6, [8], {}),
    "C077": (
        "a.csv",
        T + "good,1\nbad,\nfine,1\nawful,0\nmeh,\n",
        1,
        5,
        3,
        [3, 6],
        {"labels": {"0": 1, "1": 2}},
    ),
    "C079 zeros": (
        "a.csv",
        T + "a,01\nb,1\nc,02\nd,2\n",
        0,
        4,
        4,
        [],
        {"labels": {"01": 1, "1": 1, "02": 1, "2": 1}},
    ),
    "C080": ("a.csv", T + '"",1\n"  ",0\n"\t",1\nreal,0\nmore,1\n', 1, 5, 2, [2, 3, 4], {}),
    "C081": ("a.jsonl", OBJECT("token " * 9000, 1) + OBJECT("short", 0), 0, 2, 2, [], {}),
    "C082": ("a.csv", T + "a,1\nb,0\nc,0\nd,0\ne,0\nf,1\nunknown,-1\n", 0, 7, 7, [8], {}),
    "C087 semicolon": (
        "a.csv",
        "text;label\nalles gut;1\nkaputt, schade;0\n",
        0,
        2,
        2,
        [],
        {"delimiter": ";"},
    ),
    "C087 tab": ("a.csv", "text\tlabel\nfine\t1\nbad, bad\t0\n", 0, 2, 2, [], {"delimiter": "\t"}),
    "C087 no header": ("a.csv", "fine thing,1\nbad thing,0\nnice,1\n", 1, 0, 0, [], {}),
    "C088 list": (
        "a.jsonl",
        '[\n {"text": "a", "label": 1},\n {"text": "b", "label": 0}\n]\n',
        0,
        2,
        2,
        [],
        {},
    ),
    "C089 empty": ("a.csv", "", 1, 0, 0, [], {}),
    "C089 header": ("a.csv", T, 1, 0, 0, [], {}),
}


@pytest.mark.parametrize("case", SAMPLES)
def test_a_sample_gets_the_right_answer(case: str, tmp_path: Path) -> None:
    name, content, code, rows, kept, lines, facts = SAMPLES[case]
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    command = [sys.executable, "-m", "snugtune", "check-data", str(path), "--json"]
    done = subprocess.run(
        command, capture_output=True, check=False, env={**os.environ, "HF_HOME": str(tmp_path)}
    )
    assert done.returncode == code, done.stderr
    found = json.loads(done.stdout)
    assert (found["rows"], found["kept"]) == (rows, kept)
    assert [finding["line"] for finding in found["findings"] if finding["line"]] == lines
    assert {key: found[key] for key in facts} == facts


def test_reversed_rows_give_the_same_classes(tmp_path: Path) -> None:
    """C078."""
    import snugtune

    rows = GOOD.replace(",1", ",positive").replace(",0", ",negative").splitlines()
    answers = []
    for number, body in enumerate((rows[1:], rows[:0:-1])):
        path = tmp_path / f"{number}.csv"
        path.write_text("\n".join([rows[0], *body]) + "\n")
        answers.append([*snugtune.check_data(path).labels.items()])
    assert answers == [[("negative", 8), ("positive", 8)]] * 2
