"""Signals: the first one saves, a second Ctrl-C leaves at once, and dead helpers are explained."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import snugtune
from snugtune import cli
from snugtune.errors import ProcessError
from snugtune.record import read_record
from snugtune.step import Step
from snugtune.training.interrupt import Interrupts
from snugtune.training.positions import list_checkpoints
from snugtune.training.workers import explained_dead_workers
from tiny_runs import assert_equal, stop_after

needs_posix = pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")


@needs_posix
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_the_update_is_finished_and_saved_and_the_run_says_so(train, monkeypatch, capfd, number):
    """C096."""
    whole = train("whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 6, getattr(signal, number))
        real = Step.launch
        launched = []
        patch.setattr(Step, "launch", lambda *a, **more: launched.append(1) or real(*a, **more))
        assert (train("parts").updates, len(launched)) == (7, 7)
    record = read_record(whole.folder.parent / "parts" / "record.jsonl")
    assert [line["update"] for line in record.checkpoints] == [7]  # not twice
    assert_equal(whole, train("parts"))


@needs_posix
def test_the_first_signal_says_what_happens_and_a_second_ctrl_c_leaves(capfd):
    def interrupted() -> None:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupts.requested
            assert "once more stops at once" in capfd.readouterr().err
            os.kill(os.getpid(), signal.SIGTERM)  # systems repeat themselves
            assert capfd.readouterr().err == ""
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("it did not leave")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert capfd.readouterr().err.strip().startswith("stopped at once")
    assert signal.getsignal(signal.SIGINT) is before


@needs_posix
def test_a_ctrl_c_that_a_launcher_hands_on_is_no_second_one(capfd):
    with Interrupts(launched=True, quiet=True) as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.requested
    assert capfd.readouterr().err == ""


@needs_posix
def test_two_ctrl_c_end_a_command_with_130_in_one_line_and_the_run_goes_on_later(train, reviews, tiny_model):
    """C096."""
    whole = train("whole", epochs=10)
    command = ["train", "--model", str(tiny_model), "--data", str(reviews), "--batch-size", "8"]
    command += ["--epochs", "10", "--learning-rate", "1e-2", "--output", "cut"]
    program = [sys.executable, "-m", "snugtune", *command]
    source = str(Path(snugtune.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "PYTHONUNBUFFERED": "1"}
    folder = whole.folder.parent
    place = folder / "cut" / "checkpoints"

    process = subprocess.Popen(
        program, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not list_checkpoints(place) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    # Two that are sent at the same moment arrive as one; the run then saves, which is as good.
    time.sleep(0.05)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in said + errors
    assert_equal(whole, train("cut", epochs=10))


@needs_posix
def test_an_interrupted_command_prints_the_one_that_continues(
    reviews, tiny_model, tmp_path, monkeypatch, capsys
):
    words = ["snugtune", "train", "--model", str(tiny_model), "--data", str(reviews), "--epochs", "2"]
    words += ["--batch-size", "8", "--output", str(tmp_path / "my run")]
    monkeypatch.setattr(sys, "argv", words)
    stop_after(monkeypatch, 3)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as caught:
            cli.main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert caught.value.code == 130
    said = capsys.readouterr().out.splitlines()
    assert "interrupted after update 4 of 14 and saved; the same command continues" in said[-2]
    assert said[-1] == f"continue  {shlex.join(words)}"


@needs_posix
@pytest.mark.parametrize(("number", "why", "do"), [
    (signal.SIGKILL, "SIGKILL: most often the system ran out of memory", "data.workers=0"),
    (signal.SIGBUS, "SIGBUS: the shared memory /dev/shm is too small", "--shm-size"),
    (signal.SIGSEGV, "SIGSEGV", "data.workers=0"),
] if os.name != "nt" else [])  # fmt: skip
def test_a_process_that_loads_data_and_dies_is_explained(train, monkeypatch, number, why, do):
    import multiprocessing

    whole = train("whole")
    real = Step.launch

    def kill(self, passes, *, number: int, **more):
        if number == 9:
            for child in multiprocessing.active_children():
                os.kill(child.pid, deadly)
            time.sleep(0.5)
        return real(self, passes, number=number, **more)

    deadly = number
    with monkeypatch.context() as patch:
        patch.setattr(Step, "launch", kill)
        with pytest.raises(ProcessError, match="a process that loads data") as caught:
            train("run", {"data.workers": 1})
    assert why in caught.value.why
    assert do in caught.value.do
    assert_equal(whole, train("run"))


def test_other_errors_are_left_as_they_are():
    with pytest.raises(RuntimeError, match="the lamp"), explained_dead_workers():
        raise RuntimeError("the lamp fell on the keyboard")
    with pytest.raises(ProcessError) as caught, explained_dead_workers():
        raise RuntimeError("DataLoader worker (pid(s) 12, 13) exited unexpectedly")
    assert "12, 13" in caught.value.what
    assert "unknown" in caught.value.why


@needs_posix
@pytest.mark.parametrize("evaluation", [1, 2], ids=["middle", "end"])
@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR1"])
def test_a_signal_during_an_evaluation_does_not_wait_for_its_end(train, monkeypatch, number, evaluation):
    """The evaluation is done when the run continues, and the result is that of a run without a stop."""
    settings = {"data.validation_fraction": 0.5, "evaluation.every_updates": 4}
    whole = train("whole", settings)
    real, passes, evaluated = Step.evaluate, [], []

    def evaluate(self, batch):
        position = len(list_checkpoints(whole.folder.parent / "parts" / "checkpoints"))
        passes.append(1)
        if position == evaluation - 1 and not evaluated:
            evaluated.append(len(passes))
            os.kill(os.getpid(), getattr(signal, number))
        return real(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "evaluate", evaluate)
        stopped = train("parts", settings)
    assert (stopped.status, stopped.updates) == ("interrupted", 4 * evaluation)
    assert len(passes) == evaluated[0]
    record = read_record(stopped.folder / "record.jsonl")
    assert len(record.evaluations) == evaluation - 1
    with monkeypatch.context() as patch:  # once more, before the first update
        patch.setattr(Step, "evaluate", lambda *a: os.kill(os.getpid(), signal.SIGTERM) or real(*a))
        assert train("parts", settings).updates == 4 * evaluation
    last = train("parts", settings)
    assert_equal(whole, last)
    scores = [
        [(line["update"], line["metrics"], line["best"]) for line in read_record(path).evaluations]
        for path in (whole.folder / "record.jsonl", last.folder / "record.jsonl")
    ]
    assert scores[0] == scores[1]
    assert last.metrics == whole.metrics
