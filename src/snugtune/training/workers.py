"""The processes that load data, and what ended one of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from snugtune.errors import ProcessError

_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")
_SIGNAL = re.compile(r"is killed by signal: ([^.]+)\.")
_CODE = re.compile(r"exit code (\d+)")
_FEWER = "add --set data.workers=0 to the same command, and it continues from the last checkpoint"
# strsignal's words differ between systems; these parts do not.
_CAUSES = (
    ("kill", "SIGKILL", "most often the system ran out of memory and ended it", _FEWER),
    (
        "bus error",
        "SIGBUS",
        "the shared memory /dev/shm is too small or full",
        f"give the container more (docker run --shm-size 8g), or {_FEWER}",
    ),
    ("segmentation", "SIGSEGV", "a library in it crashed", _FEWER),
    ("terminated", "SIGTERM", "somebody ended it", "the same command continues from the last checkpoint"),
)


@contextmanager
def explained_dead_workers() -> Iterator[None]:
    """Say what ended a process that loads data, in the place of a traceback of the loader.

    Raises:
        ProcessError: One of them died.
    """
    try:
        yield
    except RuntimeError as error:
        found = _explain(error)
        if found is None:
            raise
        raise found from error


def _explain(error: BaseException) -> ProcessError | None:
    texts = []
    link: BaseException | None = error
    while link is not None:
        texts.append(str(link))
        link = link.__cause__ or link.__context__
    text = "\n".join(texts)
    worker = _WORKER.search(text)
    if worker is None:
        return None
    what = f"a process that loads data ({worker[1]}) has died"
    by, code = _SIGNAL.search(text), _CODE.search(text)
    if by is not None:
        for part, name, why, do in _CAUSES:
            if part in by[1].lower():
                return ProcessError(what, why=f"by signal {name}: {why}", do=do)
        return ProcessError(what, why=f"by a signal: {by[1]}", do=_FEWER)
    why = "its cause is unknown" if code is None else f"it ended with exit code {code[1]}"
    return ProcessError(what, why=why, do=_FEWER)
