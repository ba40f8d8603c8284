"""One run in one folder at a time."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import snugtune
from snugtune.errors import RunFolderError
from snugtune.runfile import load_config
from snugtune.training.folder import HOLDER, LOCK
from snugtune.training.lock import open_locked

HOLD = """
import os, sys, time
from snugtune.runfile import load_config
from snugtune.training.lock import open_locked
config = load_config(everyday={"model": "m", "data": "d.csv", "output": sys.argv[1]})
with open_locked(config):
    child = os.fork() if sys.argv[2] == "fork" else 1
    if child == 0:
        time.sleep(2)
        os._exit(0)
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def config(tmp_path):
    return load_config(everyday={"model": "m", "data": "d.csv", "output": str(tmp_path / "run")})


@pytest.fixture
def holder(tmp_path):
    """A function that starts a process which holds the lock, and waits until it does."""
    started = []

    def start(how: str = "alone") -> subprocess.Popen:
        source = str(Path(snugtune.__file__).parents[1])
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path / "run"), how],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": source},
        )
        started.append(process)
        assert process.stdout.readline() == "locked\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_second_run_in_the_folder_is_refused_and_told_who_has_it(config, holder):
    process = holder()
    with pytest.raises(RunFolderError, match="another run uses") as caught, open_locked(config):
        pass
    assert f"process {process.pid} on " in caught.value.why
    assert "-2" in caught.value.do
    process.kill()
    process.wait()
    with open_locked(config) as folder:
        assert folder.state == "new"


def test_also_in_the_same_process(config):
    with open_locked(config):
        with pytest.raises(RunFolderError, match=f"another run.*{config.folder.name}"), open_locked(config):
            pass
        assert (config.folder / HOLDER).exists()
    assert sorted(path.name for path in config.folder.iterdir()) == [LOCK]
    with open_locked(config):
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_that_a_killed_run_left_behind_are_waited_for(config, holder):
    process = holder("fork")
    process.kill()
    process.wait()
    began = time.monotonic()
    with open_locked(config) as folder:
        assert folder.state == "new"
    assert time.monotonic() - began < 15


def test_the_other_processes_of_a_run_share_the_folder(config, holder, monkeypatch):
    holder()
    monkeypatch.setenv("RANK", "1")
    with open_locked(config) as folder:
        assert folder.state == "new"


def test_a_folder_of_somebody_else_is_refused_without_a_trace(config):
    config.folder.mkdir()
    (config.folder / "thesis.docx").write_text("years of work")
    with pytest.raises(RunFolderError, match="is not a run of snugtune"), open_locked(config):
        pass
    assert [path.name for path in config.folder.iterdir()] == ["thesis.docx"]


@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
def test_without_a_lock_file_a_folder_can_still_be_looked_at(config, monkeypatch):
    def refuse(*args, **more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    with open_locked(config) as folder:
        assert folder.state == "new"


@pytest.mark.parametrize(
    ("error", "warns"),
    [
        (NotImplementedError("no flock here"), True),
        (OSError(errno.ENOLCK, "No locks available"), True),
        (OSError(errno.EIO, "Input/output error"), True),
        (PermissionError(errno.EACCES, "the lock is another user's"), True),
        (OSError(errno.EROFS, "Read-only file system"), False),
    ],
    ids=str,
)
def test_a_folder_that_cannot_be_locked_is_used_but_not_in_silence(config, monkeypatch, caplog, error, warns):
    def fail(*args: object, **more: object) -> None:
        raise error

    monkeypatch.setattr("filelock.FileLock.acquire", fail)
    with open_locked(config) as folder:
        assert folder.state == "new"
    assert ("cannot be locked" in caplog.text and "no other run" in caplog.text) == warns
