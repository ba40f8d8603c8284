"""The commands as people type them, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import snugtune
from snugtune.record import read_record


def run(*arguments: object, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run `snugtune` with arguments; variables are added to the environment."""
    return subprocess.run(
        [sys.executable, "-m", "snugtune", *map(str, arguments)],
        capture_output=True,
        env={**os.environ, "COLUMNS": "100", **variables},
        check=False,
        timeout=240,
    )


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    """40 texts with Chinese labels, in a tab-separated file with unusual column names."""
    rows = [
        f"{('很好看' if row % 2 else '无聊') + '的电影' * (row % 3 + 1)}\t{'好评' if row % 2 else '差评'}"
        for row in range(40)
    ]
    path = tmp_path / "评论.tsv"
    path.write_text("\n".join(["评语\t结果", *rows]) + "\n", encoding="utf-8")
    return path


def flags(reviews: Path, tiny_model: Path) -> list[object]:
    return ["--model", tiny_model, "--data", reviews, "--text-column", "评语", "--label-column", "结果"]


def test_shell_run_file_and_python_give_the_same_model(reviews, tiny_model, tmp_path):
    everyday = ["--epochs", 1, "--batch-size", 8, "--learning-rate", "3e-3", "--output", tmp_path / "shell"]
    shell = run("train", *flags(reviews, tiny_model), *everyday, "--set", "training.weight_decay=0.1")
    assert shell.returncode == 0, shell.stderr.decode()

    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        f"model: {{name: {tiny_model}}}\n"
        f"data: {{train: {reviews}, text_column: 评语, label_column: 结果}}\n"
        "training: {epochs: 1, batch_size: 8, learning_rate: 1e-9, weight_decay: 0.1}\n",
        encoding="utf-8",
    )
    from_file = run("train", run_file, "--set", "training.learning_rate=3e-3", "--output", tmp_path / "file")
    assert from_file.returncode == 0, from_file.stderr.decode()

    snugtune.train(
        model=tiny_model, data=reviews, text_column="评语", label_column="结果", epochs=1, batch_size=8,
        learning_rate=3e-3, output=tmp_path / "python", set={"training.weight_decay": 0.1}, quiet=True,
    )  # fmt: skip
    models = [
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("shell", "file", "python")
    ]
    for other in models[1:]:
        assert all(torch.equal(models[0][name], other[name]) for name in models[0])
    losses = [
        [line["loss"] for line in read_record(tmp_path / name / "record.jsonl").updates]
        for name in ("shell", "file", "python")
    ]
    assert len(losses[0]) == 5
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "gbk", "latin-1", "cp1252"])
def test_output_survives_any_terminal_encoding(reviews, tiny_model, tmp_path, encoding):
    done = run("train", *flags(reviews, tiny_model), "--epochs", 1, "--output", tmp_path / "run",
               PYTHONIOENCODING=encoding, PYTHONUTF8="0")  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    text = done.stdout.decode(encoding)
    assert ("好评" if encoding in ("utf-8", "gbk") else "\\u597d\\u8bc4") in text
    assert "accuracy" in text
    assert done.stderr == b""


def test_quiet_prints_nothing_and_verbose_every_update(reviews, tiny_model, tmp_path):
    quiet = run("train", *flags(reviews, tiny_model), "--epochs", 1, "--output", tmp_path / "a", "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, b"", b"")
    verbose = run("train", *flags(reviews, tiny_model), "--epochs", 2, "--batch-size", 4, "--output",
                  tmp_path / "b", "--verbose")  # fmt: skip
    lines = verbose.stdout.decode().splitlines()
    assert sum("this update's loss" in line for line in lines) == 18


def test_the_second_time_the_results_are_shown(reviews, tiny_model, tmp_path):
    arguments = ["train", *flags(reviews, tiny_model), "--epochs", 1, "--output", tmp_path / "run"]
    first, second = run(*arguments), run(*arguments)
    assert second.returncode == 0
    assert b"learning rate" not in second.stdout
    results = first.stdout.decode().partition("done ")[2]
    assert results
    assert second.stdout.decode().partition("done ")[2] == results


def test_the_budget_is_shown_as_it_was_understood(reviews, tiny_model, tmp_path):
    done = run(
        "train", *flags(reviews, tiny_model), "--epochs", 1, "--budget", "11GB", "--output", tmp_path / "r"
    )
    assert "10.2 GiB" in done.stdout.decode()


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (["train"], 2, ["model.name is not given", "--model"]),
        (["train", "--model", "m"], 2, ["data.train is not given", "--data"]),
        (["train", "none.yaml"], 2, ["cannot read the run file none.yaml"]),
        (["train", "--model", "m", "--data", "d", "--set", "training.lerning_rate=1"], 2,
         ["did you mean training.learning_rate"]),
        (["train", "--model", "m", "--data", "d", "--epochs", "two"], 2, ["--epochs"]),
        (["train", "--model", "m", "--data", "d", "--epochs", "-1"], 2, ["training.epochs cannot be -1"]),
        (["train", "--model", "m", "--data", "d", "--batch-size", "0"], 2, ["batch_size cannot be 0"]),
        (["train", "--model", "m", "--data", "d", "--budget", "lots"], 2, ["training.budget", "11 GiB"]),
        (["train", "--model", "m", "--data", "./none.csv"], 1, ["none.csv"]),
        (["train", "--modle", "m"], 2, ["--model"]),
        (["trian"], 2, ["train"]),
        (["doctor", "--install-line", "numpy"], 2, ["torch"]),
    ],
)  # fmt: skip
def test_wrong_usage_ends_in_words_and_never_in_a_traceback(arguments, code, parts, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "snugtune", *arguments],
        capture_output=True,
        cwd=tmp_path,
        check=False,
        timeout=120,
    )
    text = (done.stdout + done.stderr).decode()
    assert done.returncode == code, text
    assert "Traceback" not in text
    for part in parts:
        assert part in text
    assert list(tmp_path.rglob("config.yaml")) == []


def test_bad_data_and_bad_models_end_in_words(reviews, tiny_model, tmp_path):
    wrong_column = run("train", "--model", tiny_model, "--data", reviews, "--output", tmp_path / "a")
    assert wrong_column.returncode == 2
    assert "评语" in wrong_column.stderr.decode()
    (tmp_path / "empty").mkdir()
    no_model = run("train", *flags(reviews, tmp_path / "empty"), "--output", tmp_path / "b")
    assert no_model.returncode == 1
    assert "config.json" in no_model.stderr.decode()
    for done in (wrong_column, no_model):
        assert "Traceback" not in done.stderr.decode()


def test_print_config_shows_a_run_file_that_can_be_used(reviews, tiny_model, tmp_path):
    template = run("train", "--print-config")
    assert template.returncode == 0
    assert "# Highest learning rate" in template.stdout.decode()
    full = run(
        "train", *flags(reviews, tiny_model), "--epochs", 1, "--set", "training.seed=5", "--print-config"
    )
    (tmp_path / "run.yaml").write_bytes(full.stdout)
    assert not list(tmp_path.glob("runs"))
    trained = run("train", tmp_path / "run.yaml", "--output", tmp_path / "run", "--quiet")
    assert trained.returncode == 0, trained.stderr.decode()
    assert "seed: 5" in (tmp_path / "run" / "config.yaml").read_text("utf-8")


def test_without_torch_a_finished_run_is_shown_and_training_says_what_to_install(
    reviews, tiny_model, tmp_path
):
    train = ["train", *flags(reviews, tiny_model), "--epochs", 1]
    whole = run(*train, "--output", tmp_path / "run")
    light = tmp_path / "light.py"
    light.write_text(
        "import sys\n"
        "for name in 'torch numpy transformers datasets accelerate pyarrow torchmetrics'.split():\n"
        "    sys.modules[name] = None\n"
        "from snugtune.cli import main\n"
        "main()\n"
    )

    def without(*arguments):
        command = [sys.executable, light, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    shown = without(*train, "--output", tmp_path / "run")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.splitlines()[-1] == whole.stdout.decode().splitlines()[-1]
    for arguments in ([*train, "--output", tmp_path / "new"], ["demo", "--output", tmp_path / "demo"]):
        refused = without(*arguments)
        assert refused.returncode == 1
        assert 'pip install "snugtune[' in refused.stderr
        assert "Traceback" not in refused.stderr
    assert without("doctor", "--install-line", "torch").returncode == 0


def test_version_and_help():
    assert run("--version").stdout.decode().strip() == f"snugtune {snugtune.__version__}"
    text = run("--help").stdout.decode()
    assert all(command in text for command in ("train", "demo", "doctor"))


def test_the_install_line_is_one_line_that_a_shell_can_run():
    done = run("doctor", "--install-line", "torch")
    assert done.returncode == 0
    assert done.stdout.decode().startswith("pip install ")
    assert len(done.stdout.decode().splitlines()) == 1
    assert run("doctor", "--install-line", "torch", "--fallback").returncode == 0


def test_several_label_columns_make_a_multi_label_model(tiny_model, tmp_path):
    rows = [
        f"the {'good' if r % 2 else 'bad'} {'film' if r % 3 else 'book'},{r % 2},{int(r % 3 > 0)}"
        for r in range(40)
    ]
    (tmp_path / "many.csv").write_text("\n".join(["text,liked,film", *rows]))
    done = run("train", "--model", tiny_model, "--data", tmp_path / "many.csv", "--label-column", "liked",
               "--label-column", "film", "--epochs", 1, "--output", tmp_path / "run")  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    assert "micro_f1" in done.stdout.decode()
