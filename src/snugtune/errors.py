"""The errors snugtune raises on purpose. Each says what happened, why, and what to do.

SnugtuneError
├── UsageError            the command, run file or argument is wrong (exit code 2)
├── DataError             a data file cannot be used as it is
├── ModelError            a model cannot be loaded or trained as asked
├── HubError              a model or data set could not be fetched
├── RunFolderError        the run's folder belongs to something else, or cannot be written
├── MissingDependency     a package that this action needs is not installed
├── HardwareError         the card or its driver cannot do what was asked
└── ProcessError          another process of the same run has failed
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType


class SnugtuneError(Exception):
    """Something a person can act on.

    Args:
        what: What happened, with the offending value, file and line, or setting.
        why: The cause, as far as it is known.
        do: What to do now.
    """

    exit_code = 1

    def __init__(self, what: str, *, why: str, do: str) -> None:
        super().__init__(f"{what}\n  why: {why}\n  do:  {do}")
        self.what, self.why, self.do = what, why, do


class UsageError(SnugtuneError):
    """The command, run file or argument is wrong."""

    exit_code = 2


class DataError(SnugtuneError):
    """A data file cannot be used as it is.

    Args:
        what, why, do: As for every error.
        rows: The rows that it is about, counted from 1, where `what` names them.
    """

    def __init__(self, what: str, *, why: str, do: str, rows: Sequence[int] = ()) -> None:
        super().__init__(what, why=why, do=do)
        self.rows = tuple(int(row) for row in rows)


class ModelError(SnugtuneError):
    """A model cannot be loaded or trained as asked."""


class HubError(SnugtuneError):
    """A model or data set could not be fetched from the hub."""


class RunFolderError(SnugtuneError):
    """The run's folder belongs to something else, or cannot be written."""


class MissingDependency(SnugtuneError):
    """A package that this action needs is not installed."""


class HardwareError(SnugtuneError):
    """The card or its driver cannot do what was asked."""


class ProcessError(SnugtuneError):
    """Another process of the same run has failed."""


def need(module: str, *, extra: str, because: str) -> ModuleType:
    """Import `module` at the moment of use.

    Args:
        module: Name of the module to import.
        extra: The extra of this package that brings it.
        because: What it is wanted for, as the subject of a sentence ("training").

    Raises:
        MissingDependency: It did not import; the message has the pip line.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingDependency(
            f"{because} needs the package {module!r}, which did not import",
            why=str(error),
            do=f'pip install "snugtune[{extra}]"; torch before it, by `snugtune doctor --install-line torch`',
        ) from error
