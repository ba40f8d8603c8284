"""`snugtune evaluate` and `snugtune predict` as people type them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import snugtune
from inference.samples import TEXTS, read_csv, write_csv
from snugtune import cli
from snugtune.inference import predictor
from snugtune.step import Step


@pytest.fixture
def shell(monkeypatch, capfd):
    """A function that runs a command in this process; it returns exit code, output and error output."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["snugtune", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def new(tmp_path):
    """A CSV file of texts."""
    return write_csv(tmp_path / "new.csv", ["id", "text"], list(enumerate(TEXTS)))


def test_evaluate_prints_the_tables_of_the_training(shell, finished):
    run = finished("single")
    code, out, err = shell("evaluate", run, "--data", run.parent / "data.csv")
    assert code == 0, err
    assert out.startswith(f"done      40 rows of {run.parent / 'data.csv'}: accuracy ")
    assert "each label" in out
    assert "right label (row) and answer (column)" in out
    assert "on CPU" in err
    assert "rows/s" not in err  # no bar where nobody looks


@pytest.mark.parametrize("kind", ["single", "several", "number"])
def test_evaluate_prints_one_json_object(shell, finished, kind):
    data = finished(kind).parent / "data.csv"
    code, out, err = shell("evaluate", finished(kind), "--data", data, "--json", "--quiet")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["rows"] == 40
    assert found["data"] == str(data)
    assert found["metrics"] == snugtune.evaluate(finished(kind), data, quiet=True)


def test_json_says_null_where_a_score_is_no_number(shell, finished, tmp_path):
    data = write_csv(tmp_path / "test.csv", ["text", "label"], [["good", 1.5], ["bad", 1.5]])
    code, out, _ = shell("evaluate", finished("number"), "--data", data, "--json")
    assert code == 0
    assert json.loads(out)["metrics"]["pearson"] is None


def test_predict_prints_csv_and_keeps_messages_apart(shell, finished, new, tmp_path):
    code, out, err = shell("predict", finished("single"), "--data", new)
    assert code == 0
    assert "on CPU" in err
    assert shell("predict", finished("single"), "--data", new, "--output", tmp_path / "a.csv")[0] == 0
    assert out == (tmp_path / "a.csv").read_text("utf-8")
    assert [row[1] for row in read_csv(tmp_path / "a.csv")[1:]] == TEXTS
    code, lines, _ = shell("predict", finished("single"), "--data", new, "--json")
    assert [json.loads(line)["text"] for line in lines.splitlines()] == TEXTS


def test_predict_keeps_json_as_it_is_written(shell, finished, tmp_path):
    rows = [{"when": "2024-01-01 00:00:00", "text": "good"}, {"text": "bad", "n": 12345678901234567890}]
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = shell("predict", finished("number"), "--data", tmp_path / "new.jsonl", "--json")
    assert code == 0
    found = [json.loads(line) for line in out.splitlines()]
    assert [{name: row[name] for name in row if name != "predicted_value"} for row in found] == rows


@pytest.mark.parametrize("name", ["a.tsv", "a.jsonl", "a.parquet"])
def test_predict_writes_every_format(shell, finished, new, tmp_path, name):
    code, out, err = shell("predict", finished("tags"), "--data", new, "--output", tmp_path / name)
    assert (code, out) == (0, "")
    assert f"answers   {len(TEXTS)} rows in {tmp_path / name}" in err
    from snugtune.data.readers import read_table

    table = read_table(tmp_path / name)
    assert table.column_names[2:] == ["predicted_labels", "predicted_score_film", "predicted_score_liked"]
    assert table["text"][:] == TEXTS


def test_predict_answers_texts_one_line_each(shell, finished):
    code, out, err = shell("predict", finished("single"), "--text", "a good\nfilm", "--text", "bad")
    assert (code, err) == (0, "")
    answers = snugtune.predict(finished("single"), texts=["a good\nfilm", "bad"], quiet=True).answers
    assert out.splitlines() == [
        f"{answer['predicted_label']}  {answer['predicted_score']:.4f}  {text}"
        for answer, text in zip(answers, ["a good film", "bad"], strict=True)
    ]
    code, out, _ = shell("predict", finished("pair"), "--text", "a", "--text-pair", "b", "--json")
    assert {"text": "a", "text_pair": "b"}.items() <= json.loads(out).items()
    code, out, _ = shell("predict", finished("several"), "--text", "a good film")
    assert "(liked 0." in out
    assert "film 0." in out


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["predict", "RUN"], 2, "--data or --text"),
        (["predict", "RUN", "--data", "NEW", "--text", "a"], 2, "both are given"),
        (["predict", "RUN", "--data", "NEW", "--output", "NEW", "--overwrite"], 2, "the very file"),
        (["predict", "RUN", "--data", "NEW", "--output", "THERE"], 2, "--overwrite"),
        (["predict", "RUN", "--data", "NEW", "--output", "x.doc"], 2, ".parquet"),
        (["predict", "RUN", "--data", "NEW", "--output", "x.csv", "--json"], 2, "--json"),
        (
            ["predict", "RUN", "--data", "NEW", "--precision", "half"],
            2,
            "training.precision cannot be 'half'",
        ),
        (["predict", "RUN", "--data", "NEW", "--text-column", "body"], 2, "no column 'body'"),
        (["predict", "RUN", "--data", "NEW", "--text-pair", "a"], 2, "--text-pair has no effect on data"),
        (["predict", "RUN", "--data", "none.csv"], 1, "none.csv"),
        (["predict", "NONE", "--text", "a"], 1, "is not the folder of a run"),
        (["predict", "RUN", "--text", "a", "--split", "test"], 2, "--split has no effect on texts"),
        (["evaluate", "RUN"], 2, "--data"),
        (["evaluate", "RUN", "--data", "NEW"], 2, "no column 'label'"),
        (["evaluate", "RUN", "--data", "NEW", "--label-column", "id"], 1, "is not in the training data"),
    ],
)
def test_what_is_wrong_ends_in_words(shell, finished, new, tmp_path, monkeypatch, arguments, code, part):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.csv").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    places = {"RUN": finished("single"), "NEW": new, "THERE": "there.csv", "NONE": tmp_path / "none"}
    found, out, err = shell(*(places.get(word, word) for word in arguments))
    assert found == code, err
    assert part in err
    assert "Traceback" not in err
    assert out == ""
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_output_that_is_there_is_replaced_on_request(shell, finished, new, tmp_path):
    (tmp_path / "a.csv").write_text("old")
    code, _, _ = shell(
        "predict", finished("single"), "--data", new, "--output", tmp_path / "a.csv", "--overwrite"
    )
    assert code == 0
    assert len(read_csv(tmp_path / "a.csv")) == len(TEXTS) + 1


def test_ctrl_c_leaves_nothing_half_written(shell, finished, new, tmp_path, monkeypatch):
    real, calls = Step.evaluate, []

    def interrupted(self, batch):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, batch)

    monkeypatch.setattr(Step, "evaluate", interrupted)
    monkeypatch.setattr(predictor, "WINDOW_ROWS", 4)
    code, out, err = shell("predict", finished("single"), "--data", new, "--output", tmp_path / "a.csv")
    assert (code, out) == (130, "")
    assert f"of {len(TEXTS)} rows; {tmp_path / 'a.csv'} was not written" in err
    assert [path.name for path in tmp_path.iterdir()] == ["new.csv"]


@pytest.mark.parametrize("command", [["predict", "--text", "a"], ["evaluate", "--data", "a.csv"]])
def test_without_torch_they_say_what_to_install(finished, tmp_path, command):
    light = tmp_path / "light.py"
    light.write_text(
        "import sys\n"
        "for name in 'torch numpy transformers datasets pyarrow torchmetrics'.split():\n"
        "    sys.modules[name] = None\n"
        "from snugtune.cli import main\n"
        "main()\n"
    )
    name, *flags = command
    arguments = [sys.executable, str(light), name, str(finished("single")), *flags]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert 'pip install "snugtune[train]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away_is_no_error(finished, new):
    command = [sys.executable, "-m", "snugtune", "predict", str(finished("single")), "--data", str(new)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err.decode()
    assert b"Traceback" not in err
    assert b"BrokenPipe" not in err


def test_in_a_terminal_there_is_a_bar(finished, new, tmp_path):
    import pty

    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "snugtune", "predict", str(finished("single")), "--data", str(new)]
    process = subprocess.Popen(
        [*command, "--output", str(tmp_path / "a.csv")],
        stderr=theirs,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(theirs)
    shown = b""
    while process.poll() is None:
        time.sleep(0.05)
        try:
            shown += os.read(ours, 65536)
        except OSError:  # Linux says so when the other side is closed
            break
    assert process.wait(timeout=60) == 0
    assert f"{len(TEXTS)}/{len(TEXTS)}".encode() in shown
    assert b"answers " in shown
