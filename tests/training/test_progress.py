"""Progress is seen in a real terminal, a pipe and a notebook, and nothing about them ends a run."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from snugtune.training.console import console
from snugtune.training.progress import Memory, Mode, Shown, open_progress
from snugtune.training.rates import Rates

GiB = 2**30
MEMORY = Memory(allocated_bytes=5 * GiB, reserved_bytes=6 * GiB, process_bytes=7 * GiB)

# A run of ten updates after a resume at two, in a process of its own.
RUN = """if True:
    import sys
    from snugtune.training.console import console
    from snugtune.training.progress import Memory, Shown, open_progress
    memory = Memory(allocated_bytes=5 * 2**30, reserved_bytes=6 * 2**30, process_bytes=None)
    with open_progress(total_updates=10, done_updates=2, mode="normal") as progress:
        progress.say("labels: \\u597d\\u8bc4, [bold]caf\\u00e9[/bold]")
        for update in range(3, 11):
            progress.update(Shown(update=update, total_updates=10, loss=0.5, learning_rate=5e-5,
                samples_per_second=31.25, tokens_per_second=1234.5, seconds_left=200.0 - update,
                memory=memory))
            if update == 5:
                print("printed by a library")
                console().print("printed by us")
                progress.evaluation(done=1, total=2)
    sys.stderr.write("the end\\n")
"""
PRINT = 'print("printed by a library")'


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(update: int, total: int = 100, **changes: Any) -> Shown:
    values: dict[str, Any] = {
        "loss": 0.5,
        "learning_rate": 5e-5,
        "samples_per_second": None,
        "tokens_per_second": None,
        "seconds_left": None,
        "memory": None,
    }
    return Shown(update=update, total_updates=total, **{**values, **changes})


def lines_of(
    *updates: Shown, mode: Mode = "normal", seconds: float = 1.0, done_updates: int = 0
) -> list[str]:
    """What a run prints to a file when each update takes some seconds."""
    stream, clock = io.StringIO(), Clock()
    total = updates[0].total_updates
    with open_progress(
        total_updates=total, done_updates=done_updates, mode=mode, stream=stream, clock=clock
    ) as progress:
        for update in updates:
            clock.now += seconds
            progress.update(update)
    return stream.getvalue().splitlines()


def updates_in(lines: list[str]) -> list[int]:
    return [int(line.split("/")[0]) for line in lines]


class TestLines:
    def test_short_runs_get_the_first_update_every_tenth_and_the_last(self) -> None:
        lines = lines_of(*[shown(update) for update in range(1, 101)], seconds=0.1)
        assert updates_in(lines) == [1, *range(10, 101, 10)]

    def test_long_runs_get_a_line_every_ten_seconds(self) -> None:
        lines = lines_of(*[shown(update, 10_000) for update in range(1, 32)], seconds=1.0)
        assert updates_in(lines) == [1, 11, 21, 31]

    def test_the_last_update_is_always_there(self) -> None:
        assert updates_in(lines_of(*[shown(update, 3) for update in range(1, 4)], seconds=0.0))[-1] == 3

    def test_a_resumed_run_does_not_repeat_the_tenths_done_before(self) -> None:
        lines = lines_of(*[shown(update) for update in range(55, 66)], seconds=0.1, done_updates=54)
        assert updates_in(lines) == [55, 60]

    def test_a_line_has_all_facts(self) -> None:
        (line,) = lines_of(
            shown(1, samples_per_second=31.25, tokens_per_second=4567.8, seconds_left=200.0, memory=MEMORY)
        )
        assert line == (
            "1/100  3 min 20 s left  loss 0.5  learning rate 5e-05  31.2 samples/s  4,568 tokens/s  "
            "memory 5.0 GiB allocated, 6.0 GiB reserved, 7.0 GiB process"
        )

    def test_what_is_unknown_is_left_out(self) -> None:
        (line,) = lines_of(shown(1))
        assert line == "1/100  loss 0.5  learning rate 5e-05"

    def test_the_loss_is_the_mean_of_the_last_twenty(self) -> None:
        losses = [100.0] * 5 + [1.0] * 10 + [3.0] * 10
        lines = lines_of(*[shown(number, 25, loss=loss) for number, loss in enumerate(losses, 1)])
        assert "loss 2 " in lines[-1]

    def test_a_loss_that_is_not_finite_is_shown_and_does_not_spoil_the_next(self) -> None:
        losses = [1.0, math.nan, 3.0, math.inf]
        lines = lines_of(*[shown(number, 4, loss=loss) for number, loss in enumerate(losses, 1)])
        assert re.findall(r"loss (\S+)", "\n".join(lines)) == ["1", "nan", "2", "inf"]

    def test_verbose_prints_every_update_with_its_own_loss(self) -> None:
        lines = lines_of(
            shown(1, loss=1.0), shown(2, loss=2.0), shown(3, loss=3.0), mode="verbose", seconds=0.0
        )
        assert updates_in(lines) == [1, 2, 3]
        assert "loss 2 " in lines[-1]
        assert lines[-1].endswith("this update's loss 3")

    def test_quiet_prints_nothing(self) -> None:
        stream = io.StringIO()
        with open_progress(total_updates=1, done_updates=0, mode="quiet", stream=stream) as progress:
            progress.say("evaluated")
            progress.evaluation(done=1, total=1)
            progress.update(shown(1, 1))
        assert stream.getvalue() == ""

    def test_a_long_evaluation_gives_a_sign_of_life(self) -> None:
        stream, clock = io.StringIO(), Clock()
        with open_progress(
            total_updates=9, done_updates=0, mode="normal", stream=stream, clock=clock
        ) as progress:
            progress.update(shown(1, 9))
            for done in range(1, 26):
                clock.now += 1.0
                progress.evaluation(done=done, total=25)
        assert re.findall(r"evaluating \S+", stream.getvalue()) == ["evaluating 10/25", "evaluating 20/25"]

    def test_long_messages_are_not_folded_and_brackets_stay(self) -> None:
        stream = io.StringIO()
        message = "[red]" + " word" * 100
        with open_progress(total_updates=1, done_updates=0, mode="normal", stream=stream) as progress:
            progress.say(message)
        assert stream.getvalue() == message + "\n"

    def test_a_run_without_updates_shows_nothing_and_does_not_fail(self) -> None:
        stream = io.StringIO()
        with open_progress(total_updates=0, done_updates=0, mode="normal", stream=stream):
            pass
        assert stream.getvalue() == ""


def in_a_terminal(code: str, **environment: str) -> tuple[bytes, int]:
    """Run Python code in a pseudo-terminal of 80 columns -> everything it printed, and its exit status."""
    pytest.importorskip("termios", reason="pseudo-terminals need a Unix system")
    import fcntl
    import pty
    import struct
    import termios

    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    keep = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")
    }
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=there,
        stdout=there,
        stderr=there,
        env={**keep, "TERM": "xterm-256color", "PYTHONUTF8": "0", **environment},
    )
    os.close(there)
    output = b""
    try:
        while piece := os.read(here, 65536):
            output += piece
    except OSError:  # how Linux says that the other side is closed
        pass
    os.close(here)
    return output, process.wait()


class TestTerminals:
    @pytest.mark.parametrize(
        ("environment", "label", "bar"),
        [
            ({"PYTHONIOENCODING": "utf-8"}, "好评, [bold]café[/bold]", "━━━"),
            ({"PYTHONIOENCODING": "ascii"}, r"\u597d\u8bc4, [bold]caf\xe9[/bold]", "---"),
            ({"PYTHONIOENCODING": "latin-1"}, r"\u597d\u8bc4, [bold]café[/bold]", "---"),
            ({"PYTHONIOENCODING": "cp936"}, "好评, [bold]caf", "---"),
            ({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}, r"\u597d\u8bc4, [bold]caf\xe9[/bold]", "---"),
        ],
        ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else None,
    )
    def test_every_encoding_gets_a_bar_and_readable_labels(
        self, environment: dict[str, str], label: str, bar: str
    ) -> None:
        encoding = environment.get("PYTHONIOENCODING", "ascii")
        output, status = in_a_terminal(RUN, **environment)
        text = output.decode(encoding)
        assert status == 0, text
        assert "Error" not in text
        assert f"labels: {label}" in text
        assert bar in text
        assert encoding == "utf-8" or "━" not in text
        assert "10/10" in text
        assert "loss 0.5" in text
        assert "memory 5.0 GiB allocated, 6.0 GiB reserved" in " ".join(text.split())
        assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is visible again"

    def test_a_dumb_terminal_gets_lines(self) -> None:
        output, status = in_a_terminal(RUN, TERM="dumb", PYTHONIOENCODING="utf-8")
        assert status == 0
        assert b"\x1b" not in output
        assert b"10/10" in output

    def test_an_error_ends_the_bar_and_stays_readable(self) -> None:
        code = RUN.replace(PRINT, "raise RuntimeError('broken')")
        output, status = in_a_terminal(code, PYTHONIOENCODING="utf-8")
        text = output.decode()
        assert status == 1
        assert "RuntimeError: broken" in text[text.rindex("5/10") :]
        assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")

    def test_a_small_terminal_does_not_break_the_bar(self) -> None:
        output, status = in_a_terminal(RUN, COLUMNS="12", LINES="3", PYTHONIOENCODING="ascii")
        assert status == 0, output
        assert b"Error" not in output
        assert rb"\u2026" not in output

    @pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
    def test_the_screen_shows_one_bar_and_everything_said_above_it(
        self, encoding: str, need_program: Callable[[str], str], tmp_path: Path
    ) -> None:
        tmux = [need_program("tmux"), "-u", "-L", f"snugtune-{tmp_path.name}", "-f", "/dev/null"]
        script = tmp_path / "run.py"
        script.write_text(RUN, encoding="utf-8")
        environment = {**os.environ, "PYTHONIOENCODING": encoding, "SHELL": "/bin/sh"}
        command = f"'{sys.executable}' '{script}'; {' '.join(tmux)} wait-for -S done; exec cat"
        subprocess.run(
            [*tmux, "new-session", "-d", "-x", "80", "-y", "24", command],
            env=environment,
            check=True,
            timeout=60,
        )
        try:
            subprocess.run([*tmux, "wait-for", "done"], check=True, timeout=60)
            screen = subprocess.run(
                [*tmux, "capture-pane", "-p"], check=True, capture_output=True, timeout=60
            ).stdout.decode()
        finally:
            subprocess.run([*tmux, "kill-server"], check=False, timeout=60)
        lines = [line.rstrip() for line in screen.splitlines() if line.strip()]
        assert lines[0].startswith("labels: ")
        assert lines[1:3] == ["printed by a library", "printed by us"]
        assert "10/10  3 min 10 s left" in lines[3]
        assert " ".join(lines[4:6]) == (
            "loss 0.5  learning rate 5e-05  31.2 samples/s  1,234 tokens/s  memory 5.0 GiB "
            "allocated, 6.0 GiB reserved"
        )
        assert lines[6:] == ["the end"]


def in_a_pipe(code: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={**os.environ, **environment}, check=False
    )


class TestPipesAndLostStreams:
    def test_a_pipe_gets_plain_lines_even_where_colors_are_forced(self) -> None:
        done = in_a_pipe(RUN, FORCE_COLOR="1", PYTHONIOENCODING="utf-8")
        assert done.returncode == 0, done.stderr
        lines = done.stdout.decode().splitlines()
        assert lines[0].startswith("labels: 好评")
        assert lines[1].startswith("3/10")
        assert lines[-1].startswith("10/10")

    @pytest.mark.parametrize("encoding", ["ascii", "cp936", "latin-1", "utf-16"])
    def test_a_pipe_of_any_encoding_gets_every_line(self, encoding: str) -> None:
        done = in_a_pipe(RUN, PYTHONIOENCODING=encoding)
        assert done.returncode == 0, done.stderr
        assert "10/10" in done.stdout.decode(encoding)

    @pytest.mark.parametrize(
        "loss",
        ["sys.stdout = None", "sys.stdout.close()", "import os; os.close(1)"],
        ids=["none", "closed", "fd"],
    )
    def test_a_run_outlives_its_standard_output(self, loss: str) -> None:
        done = in_a_pipe(RUN.replace("import sys\n", f"import sys\n    {loss}\n", 1).replace(PRINT, "pass"))
        assert b"the end" in done.stderr
        assert b"Traceback" not in done.stderr

    @pytest.mark.skipif(sys.platform == "win32", reason="closes the reading end of a Unix pipe")
    def test_a_run_outlives_the_reader_of_its_pipe(self) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [sys.executable, "-c", RUN.replace(PRINT, "pass")],
            stdout=writing,
            stderr=subprocess.PIPE,
            check=False,
        )
        os.close(writing)
        assert b"the end" in done.stderr
        assert b"Traceback" not in done.stderr

    def test_half_a_surrogate_pair_is_shown_escaped(self) -> None:
        stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n")
        console(stream).print("file \udc80")
        stream.seek(0)
        assert stream.read() == "file \\udc80\n"

    def test_the_console_follows_a_changed_standard_output(self, monkeypatch: pytest.MonkeyPatch) -> None:
        out = console()
        for text in ("first", "second"):
            stream = io.StringIO()
            monkeypatch.setattr(sys, "stdout", stream)
            out.print(text)
            assert stream.getvalue() == text + "\n"
            stream.close()


class FakeNotebook:
    """What a notebook's kernel offers: `get_ipython`, and a display that can be replaced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.displays: list[list[str]] = []
        module = types.ModuleType("IPython.display")
        module.display = self.display  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
        monkeypatch.setitem(sys.modules, "IPython.display", module)
        shell = type("ZMQInteractiveShell", (), {})()
        monkeypatch.setattr("builtins.get_ipython", lambda: shell, raising=False)

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw
        assert display_id
        states = [data["text/plain"]]
        self.displays.append(states)

        def update(data: dict[str, str], *, raw: bool) -> None:
            assert raw
            states.append(data["text/plain"])

        return types.SimpleNamespace(update=update)


class TestNotebooks:
    def test_a_cell_shows_messages_bar_and_facts_in_place(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        notebook = FakeNotebook(monkeypatch)
        for _ in range(2):
            with open_progress(total_updates=4, done_updates=0, mode="normal") as progress:
                progress.say("accuracy 0.75")
                progress.update(shown(4, 4, seconds_left=0.0))
        assert len(notebook.displays) == 2, "a second run in the same kernel has a cell of its own"
        for states in notebook.displays:
            assert states[-1] == (f"accuracy 0.75\n[{'#' * 40}] 4/4  0 s left\nloss 0.5  learning rate 5e-05")
        assert capsys.readouterr().out == ""

    def test_a_cell_is_drawn_at_most_four_times_a_second(self, monkeypatch: pytest.MonkeyPatch) -> None:
        notebook, clock = FakeNotebook(monkeypatch), Clock()
        with open_progress(total_updates=1000, done_updates=0, mode="normal", clock=clock) as progress:
            for update in range(1, 1001):
                clock.now += 1 / 128
                progress.update(shown(update, 1000))
        (states,) = notebook.displays
        assert 1000 / 128 * 4 - 2 <= len(states) <= 1000 / 128 * 4 + 3
        assert "1000/1000" in states[-1]


class TestRates:
    def test_nothing_is_known_before_the_first_update(self) -> None:
        rates = Rates(now=0.0)
        assert rates.samples_per_second is None
        assert rates.tokens_per_second is None
        assert rates.seconds_left(updates_left=5) is None

    def test_rates_are_amounts_by_seconds(self) -> None:
        rates = Rates(now=10.0)
        rates.add(now=12.0, samples=32, tokens=1000)
        rates.add(now=14.0, samples=16, tokens=600)
        assert rates.samples_per_second == 48 / 4
        assert rates.tokens_per_second == 1600 / 4
        assert rates.seconds_left(updates_left=5) == 10.0

    def test_only_the_last_updates_count(self) -> None:
        rates = Rates(now=0.0, window=2)
        for now in (100.0, 101.0, 102.0):
            rates.add(now=now, samples=8, tokens=80)
        assert rates.samples_per_second == 8.0

    def test_a_long_evaluation_does_not_slow_the_training(self) -> None:
        rates = Rates(now=0.0)
        rates.add(now=1.0, samples=8, tokens=80)
        rates.pause(now=1.5)
        rates.resume(now=601.5)
        rates.add(now=602.0, samples=8, tokens=80)
        assert rates.samples_per_second == 8.0
        assert rates.seconds_left(updates_left=10) == 10.0

    def test_pauses_that_are_still_to_come_count_in_the_time_left(self) -> None:
        rates = Rates(now=0.0)
        rates.add(now=1.0, samples=8, tokens=80)
        for now in (1.0, 61.0):
            rates.pause(now=now)
            rates.resume(now=now + 60.0)
        assert rates.seconds_left(updates_left=10, pauses_left=2) == 10.0 + 120.0

    def test_a_clock_that_stands_still_gives_no_rate(self) -> None:
        rates = Rates(now=0.0)
        rates.add(now=0.0, samples=8, tokens=80)
        assert rates.samples_per_second is None
