"""Files with one fault each: what is said about them, whether a run would stop, and what a run gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import snugtune
from snugtune.data.look import DataCheck
from snugtune.errors import UsageError

Check = Callable[..., DataCheck]
GOOD = ["a fine film", "a good book", "great fun", "well made", "a lovely evening", "clever and funny"]
BAD = ["a dull film", "a bad book", "no fun", "badly made", "a lost evening", "neither clever nor funny"]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """A function that writes a file and checks it; settings of the group data are named without it."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def look(content: str | bytes, name: str = "a.csv", **settings: Any) -> DataCheck:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        columns = {key: settings.pop(key) for key in [*settings] if key.endswith("_column")}
        other = settings.pop("validation", None)
        if other is not None:
            (tmp_path / "other.csv").write_text(other, encoding="utf-8")
            other = tmp_path / "other.csv"
        wanted = {f"data.{key}": value for key, value in settings.items()}
        return snugtune.check_data(path, validation=other, set=wanted, **columns)

    return look


def rows(*, labels: tuple[str, str] = ("1", "0"), more: str = "") -> str:
    """A healthy file of 12 rows, and more of them."""
    lines = [f"{good},{labels[0]}\n{bad},{labels[1]}\n" for good, bad in zip(GOOD, BAD, strict=True)]
    return "text,label\n" + "".join(lines) + more


def said(found: DataCheck) -> str:
    return "\n".join(f"{finding.what} {finding.why} {finding.do}" for finding in found.findings)


def stops(found: DataCheck) -> list[int | None]:
    """The lines for which a run would stop; that these files are small is another matter."""
    return [f.line for f in found.findings if f.stops and "too few to set some aside" not in f.what]


@pytest.mark.parametrize(
    "content",
    [
        rows(),
        rows(labels=("good", "bad")),
        rows(labels=("True", "False")),
        rows().replace("\n", "\r\n"),
        rows().replace("text,label", "label,text"),
        rows(more='"a text, with a comma",1\n"two\nlines",0\n"a ""quote""",0\n\n'),
        rows(labels=("很好", "很差")),
    ],
)
def test_nothing_is_said_about_a_healthy_file(content: str, check: Check) -> None:
    if content.startswith("label"):
        content = "label,text\n" + "".join(
            ",".join(reversed(line.split(","))) + "\n" for line in rows().splitlines()[1:]
        )
    found = check(content)
    assert found.findings == []
    assert (found.refused, found.repaired) == (0, 0)
    assert found.rows == found.kept >= 12


# How the file is written


def wide(encoding: str, text: str = "") -> bytes:
    return (text or "text,label\n这部电影很好看,1\n剧情无聊,0\n服务态度不好,0\n非常满意,1\n").encode(encoding)


@pytest.mark.parametrize("written", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "gbk", "gb18030"])
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_the_same_chinese_rows_come_out_of_every_encoding(written: str, name: str, check: Check) -> None:
    text = wide("utf-8").decode()
    if name.endswith("l"):
        lines = [line.split(",") for line in text.splitlines()[1:]]
        text = "".join(f'{{"text": "{cell}", "label": {label}}}\n' for cell, label in lines)
    found = check(wide(written, text), name)
    assert (found.rows, found.labels, stops(found)) == (4, {"0": 2, "1": 2}, [])
    assert found.encoding == {"gbk": "gb18030"}.get(written, written)


@pytest.mark.parametrize("mark", [b"", b"\xff\xfe", b"\xfe\xff"])
def test_wide_encodings_are_known_with_and_without_a_mark(mark: bytes, check: Check) -> None:
    encoding = "utf-16-be" if mark == b"\xfe\xff" else "utf-16-le"
    found = check(mark + rows().encode(encoding))
    assert (found.rows, found.labels) == (12, {"0": 6, "1": 6})
    assert str(found.encoding).startswith("utf-16")


@pytest.mark.parametrize(
    ("encoding", "texts"),
    [
        ("big5", ["這部電影很好看", "故事太無聊了"]),
        ("cp932", ["とても良い映画でした", "つまらない話だった"]),
        ("euc_jp", ["とても良い映画でした", "つまらない話だった"]),
        ("cp949", ["정말 재미있는 영화였어요", "너무 지루했습니다"]),
        ("cp1251", ["Очень хороший фильм", "Скучная книга"]),
        ("koi8-r", ["Очень хороший фильм", "Скучная книга"]),
        ("cp1252", ["café was “lovely”", "naïve design — no"]),
        ("cp1252", ["schöne Hülle für 5 €", "nicht groß"]),
    ],
)
def test_other_encodings_are_found_and_named(encoding: str, texts: list[str], tmp_path: Path) -> None:
    from snugtune.data.readers import open_table

    path = tmp_path / "a.csv"
    path.write_bytes(f"text,label\n{texts[0]},1\n{texts[1]},0\n".encode(encoding))
    reading = open_table(path)
    assert (reading.encoding, reading.table["text"][:]) == (encoding, texts)
    assert "encoding" in str(reading.kind)


def test_an_encoding_that_is_not_certain_is_refused_until_it_is_named(check: Check) -> None:
    content = b"text,label\n\xff,1\nb,0\n"
    found = check(content)
    assert stops(found) == [2]
    assert "byte offset 11 (0xff)" in said(found)
    assert "data.encoding" in said(found)
    assert check(content, encoding="cp1252").encoding == "cp1252"
    with pytest.raises(UsageError, match="no encoding 'utf8000'"):
        check(content, encoding="utf8000")


def test_a_damaged_line_of_a_utf_8_file_is_one_refused_row(check: Check) -> None:
    content = rows(labels=("很好", "很差")).encode() + b"caf\xe9,1\n"
    found = check(content)
    assert stops(found) == [14]
    assert "0xe9" in said(found)
    assert found.encoding == "utf-8"
    left = check(content, bad_rows="skip")
    assert (left.rows, left.kept, left.refused, stops(left)) == (13, 12, 1, [])


def test_the_locale_decides_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(wide("utf-8"))
    environment = {**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "snugtune", "check-data", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["labels"] == {"0": 2, "1": 2}


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_the_delimiter_is_that_of_the_file(delimiter: str, name: str, check: Check) -> None:
    lines = [
        f"{text}{delimiter}{label}" for text, label in [("text", "label"), *zip(GOOD, "101010", strict=True)]
    ]
    other = ", really" if delimiter != "," else "; really"
    found = check("\n".join([*lines, f"bad{other}{delimiter}0"]), name)
    assert (found.delimiter, found.rows, found.labels) == (delimiter, 7, {"0": 4, "1": 3})


@pytest.mark.parametrize(
    "content", ["fine thing,1\nbad thing,0\nnice,1\n", "a,good\nb,bad\nc,good\n", "a,0.5\nb,1\n"]
)
def test_a_first_line_that_is_a_row_is_not_taken_for_names(content: str, check: Check) -> None:
    found = check(content)
    assert stops(found) == [None]
    assert "--no-header" in said(found)
    asked = {"text_column": "column 1", "label_column": "column 2"}
    assert check(content, header=False, **asked).rows == content.count("\n")


def test_a_first_line_of_names_that_look_like_a_row_can_be_named_so(check: Check) -> None:
    content = "2019,2020\nfine,1\nbad,0\nfine too,1\n"
    assert stops(check(content)) == [None]
    assert check(content, header=True, label_column="2020").rows == 3
    assert check(content, label_column="2020").rows == 3
    assert check("0,1\nfine,yes\nbad,no\nfine too,yes\n", label_column="1").rows == 3


def test_quotes_lines_and_huge_cells(check: Check) -> None:
    found = check(rows(more='"first\nsecond, line",1\n"he said ""fine""\n\nthen left",0\nplain,\n'))
    assert (found.rows, stops(found)) == (15, [19])
    long = check(rows(more=f"{'word ' * 30_000},1\n"))
    assert [finding.line for finding in long.findings] == [14]
    assert "150,000 characters" in said(long)


def test_a_quote_that_is_never_closed_stops_even_where_rows_may_be_left_out(check: Check) -> None:
    content = rows(more='"open,1\n' + "more,0\n" * 5)
    assert stops(check(content)) == [14]
    assert "swallows" in said(check(content, bad_rows="skip"))


def test_rows_that_do_not_fit_are_listed_with_their_lines(check: Check) -> None:
    content = rows(more='one\ntwo,1,2\nfine,1\n"quote" here,0\n')
    found = check(content)
    assert stops(found) == [14, 15, 17]
    left = check(content, bad_rows="skip")
    assert (left.rows, left.kept, left.refused, stops(left)) == (16, 13, 3, [])
    assert [finding.line for finding in left.findings] == [14, 15, 17]


def test_a_file_that_is_mostly_broken_stops_in_any_case(check: Check) -> None:
    found = check("text,label\na,1,\nb,0,\nc,1\n", bad_rows="skip")
    assert stops(found) == [2]
    assert "doubtful" in said(found)


@pytest.mark.parametrize("content", ["", "\n\n", "text,label\n", "\ufeff", "text,label\n\n\n"])
def test_a_file_without_rows_stops(content: str, check: Check) -> None:
    assert "no rows" in said(check(content))
    assert check(content).stops


# Columns


def test_a_column_name_that_is_there_twice_matters_only_where_it_is_used(check: Check) -> None:
    content = "id,text,label, label\n1,fine,0,1\n2,bad,1,0\n3,good,0,1\n4,worse,1,0\n"
    found = check(content)
    assert "'label': columns 3 and 4" in said(found)
    assert found.stops
    assert check(content, label_column="label (column 4)").labels == {"0": 2, "1": 2}
    assert stops(check(content.replace("label, label", "x,x").replace("id", "label"))) == []


def test_columns_that_nobody_named_stop_the_run_and_misspelt_ones_are_wrong_usage(check: Check) -> None:
    found = check("a,b,c\nx,y,z\nu,v,w\n")
    assert found.stops
    assert "its columns are a, b, c" in said(found)
    with pytest.raises(UsageError, match="did you mean 'label'"):
        check(rows(), label_column="labl")


# Cells


def test_words_that_mean_nothing_elsewhere_are_words(check: Check) -> None:
    content = "text,label\n" + "".join(
        f"{word},{n % 2}\n" for n, word in enumerate(["NA", "null", "None", "nan"])
    )
    assert (check(content).rows, check(content).findings) == (4, [])
    assert stops(check(content + ",1\n")) == [6]
    assert "'null'" in said(check(rows(labels=("null", "good"))))


def test_missing_labels_are_placed_and_numbers_stay_whole(check: Check) -> None:
    content = "text,label\ngood,1\nbad,\nfine,1\nawful,0\nmeh,\n"
    found = check(content)
    assert stops(found) == [3, 6]
    left = check(content, bad_rows="skip")
    assert (left.kept, left.refused, left.labels, stops(left)) == (3, 2, {"0": 1, "1": 2}, [])


def test_texts_without_content_are_placed(check: Check) -> None:
    content = 'text,label\n"",1\n"   ",0\n"\t",1\n\u3000,0\nreal,0\nother,1\n'
    assert stops(check(content)) == [2, 3, 4, 5]
    left = check(content, bad_rows="skip")
    assert (left.kept, left.refused) == (2, 4)
    assert "no row with text" in said(check('text,label\n"",1\n" ",0\n', bad_rows="skip"))


def test_spellings_of_a_label_are_listed_and_not_merged(check: Check) -> None:
    content = "text,label\na,Positive\nb,positive \nc,positive\nd,NEGATIVE\ne,negative\nf, negative\n"
    found = check(content)
    assert found.labels == {"NEGATIVE": 1, "Positive": 1, "negative": 2, "positive": 2}
    assert "'Positive', 'positive', 'positive '" in said(found)
    assert "' negative', 'NEGATIVE', 'negative'" in said(found)
    assert found.repaired == 2
    invisible = check(rows(labels=("good", "bad"), more="x,go\u200bod\n"))
    assert "'go\\u200bod'" in said(invisible)


def test_numbers_as_labels(check: Check) -> None:
    floats = check(rows(labels=("1.0", "0.0")))
    assert (floats.labels, floats.repaired) == ({"0": 6, "1": 6}, 12)
    zeros = check("text,label\na,01\nb,1\nc,01\nd,1\n")
    assert zeros.labels == {"01": 2, "1": 2}
    assert "zeros in front: '01', '1'" in said(zeros)
    negative = check(rows(more="unknown,-1\n"))
    assert [finding.line for finding in negative.findings if "-1" in finding.what][:1] == [14]
    assert check(rows(labels=("2", "1"), more="so so,3\nlala,3\n")).findings == []


def test_classes_that_are_rare_alone_or_nearly_all(check: Check) -> None:
    assert "'2' has one row" in said(check(rows(more="odd,2\n")))
    only = check("text,label\n" + "".join(f"{text},1\n" for text in GOOD))
    assert only.stops
    assert "only one class: '1'" in said(only)
    many = "text,label\n" + "".join(f"message {n},{int(n >= 196)}\n" for n in range(200))
    found = check(many)
    assert "98.0%" in said(found)
    assert "macro_f1" in said(found)
    assert not found.stops


def test_a_label_that_only_the_validation_data_has_is_named_with_its_line(check: Check) -> None:
    found = check(rows(), validation="text,label\nhm,1\nstrange,7\n")
    assert stops(found) == [3]
    assert "'7'" in said(found)
    assert not check(rows(), validation="text,label\nhm,1\n").stops


def test_copies_and_contradictions_are_counted(check: Check) -> None:
    copies = "".join(f"{text},1\n" for text in GOOD[:5])
    found = check(rows(more=copies + f"{BAD[0]},1\n"))
    assert "5 rows repeat an earlier one" in said(found)
    assert "1 text has several different labels" in said(found)
    assert [finding.line for finding in found.findings] == [14, 19]
    shared = check(rows(), validation=f"text,label\nnew,1\n{GOOD[0]} ,1\n")
    assert "1 of 2 rows to measure on" in said(shared)
    assert [finding.line for finding in shared.findings] == [3]


# JSON


def test_broken_lines_of_json_are_listed_with_reasons(check: Check) -> None:
    lines = ['{"text": "one", "label": 1}', '{"text": "cut', "", '{"text": "two", "label": 0}', "not json"]
    content = "\n".join([*lines, '{"text": "comma", "label": 1,}', '{"text": "three", "label": 1}'])
    found = check(content, "a.jsonl")
    assert stops(found) == [2, 5, 6]
    left = check(content, "a.jsonl", bad_rows="skip")
    assert (left.rows, left.kept, left.refused, left.labels) == (6, 3, 3, {"0": 1, "1": 2})


def test_mixed_types_are_told_apart(check: Check) -> None:
    items = [{"text": "a", "label": 1}, {"text": "b", "label": "0"}, {"text": 42, "label": 1}]
    items += [{"text": None, "label": 0}, {"text": ["x", "y"], "label": 1}, {"label": 0}]  # type: ignore[list-item]
    content = "".join(json.dumps(item) + "\n" for item in items)
    found = check(content, "a.jsonl")
    assert stops(found) == [4, 5, 6]
    assert "'text' is a list" in said(found)
    assert "made texts in 'text': 1" in said(found)
    assert found.labels == {"0": 1, "1": 2}


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_list_of_objects_is_read_under_any_name(name: str, check: Check) -> None:
    content = '[\n {"text": "a", "label": 1},\n {"text": "b", "label": 0},\n {"text": "", "label": 0}\n]\n'
    assert (check(content, name).rows, stops(check(content, name))) == (3, [4])


def test_texts_that_look_like_times_stay_texts(tmp_path: Path) -> None:
    from snugtune.data.readers import read_table

    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "2020-01-01", "label": "a"}\n' * 2, encoding="utf-8")
    assert read_table(path)["text"][:] == ["2020-01-01"] * 2


# The command


def run_command(*words: str) -> tuple[int, str]:
    from typer.testing import CliRunner

    from snugtune.cli import app

    done = CliRunner().invoke(app, ["check-data", *words])
    return done.exit_code, done.output


def test_the_command_answers_in_words_or_json_and_with_its_exit_code(check: Check, tmp_path: Path) -> None:
    check(rows(more="x,\n"))
    path = str(tmp_path / "a.csv")
    code, words = run_command(path)
    assert code == 1
    assert "13 read, 12 kept, 1 refused" in words
    assert "line 14" in words
    code, answer = run_command(path, "--json", "--bad-rows", "skip")
    assert code == 0
    found = json.loads(answer)
    assert [*found] == ["rows", "kept", "repaired", "refused", "labels", "encoding", "delimiter", "findings"]
    assert [*found["findings"][0]] == ["what", "why", "do", "line"]
    assert run_command(path, "--label-column", "no")[0] != 0
    assert run_command(str(tmp_path / "absent.csv"))[0] == 1


def test_the_check_needs_no_torch(check: Check, tmp_path: Path) -> None:
    check(rows())
    code = f"""
import sys
import snugtune
assert snugtune.check_data({str(tmp_path / "a.csv")!r}).rows == 12
assert "torch" not in sys.modules
"""
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
