"""The record of a run: a file of JSON lines that everything else only reads.

Every line is one object with `version`, `kind`, `time` (ISO 8601, UTC) and the fields of its kind:

    start       run_id, resumed_from_update (None or 0: from the beginning), total_updates, parameters,
                decisions [{name, value, because}], and what else describes the run
    update      update (from 1), epoch, loss, learning_rate, grad_norm, passes, samples, tokens,
                padding (share of padded positions, 0 to 1), seconds, applied (False: gradients were not
                finite, so the step was skipped), allocated_bytes, reserved_bytes, process_bytes, loss_scale,
                denominator (what the sum of the losses was divided by; 0: no label counted)
    evaluation  update, epoch, metrics {name: value}, rows, seconds, best (True: the best so far)
    checkpoint  update, path (relative to the run's folder), bytes, seconds, why
    event       what, why, do
    end         status (finished, interrupted, failed), seconds, metrics, why (of a failure)

A field that is unknown is null. JSON has no number for "not a number" and infinity: they are written as
the strings "nan", "inf" and "-inf", and come back as floats in update lines and in `metrics`.

A reader of version 1 skips lines of other versions and kinds, and lines that are damaged. Fields may be
added without a new version; a field that changes its meaning needs one.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

from snugtune.errors import RunFolderError

VERSION = 1
KINDS = ("start", "update", "evaluation", "checkpoint", "event", "end")
_COUNTED = ("update", "evaluation", "checkpoint")  # kinds that belong to an update
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

_log = logging.getLogger(__name__)

Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a record says, without the lines that a resume made void.

    Limits: everything is in memory, a few hundred bytes per update.
    """

    start: Line | None = None
    """The start of the run: the last one that began with its first update."""
    starts: list[Line] = field(default_factory=list)
    """Every start: one more for each resume."""
    updates: list[Line] = field(default_factory=list)
    """One line per update, sorted."""
    evaluations: list[Line] = field(default_factory=list)
    checkpoints: list[Line] = field(default_factory=list)
    events: list[Line] = field(default_factory=list)
    end: Line | None = None
    """How the run ended; None while it runs, after a crash, and after a resume."""
    damaged_lines: int = 0
    """Lines that are not whole: cut by a crash, or overwritten."""
    unknown_lines: int = 0
    """Lines of a kind or version that this reader does not know."""


class RecordWriter:
    """Appends lines to a record.

    Each line is one write to the file, so a crash cuts at most the last one.

    Args:
        path: The file; it is made if it does not exist, its folder is not.
        patient: Keep lines that the disk does not take, and write them before the next one. That is said
            once; `flush` tells whether they could be written in the end.

    Raises:
        RunFolderError: The file cannot be opened for writing.
    """

    def __init__(self, path: Path, *, patient: bool = False) -> None:
        self.path, self.patient = path, patient
        self._waiting: deque[bytes] = deque()
        self._warned = False
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
        try:
            self._file = os.open(path, flags, 0o644)
        except OSError as error:
            raise _cannot_write(path, error) from error
        self._line_is_cut = _ends_in_a_cut_line(self._file)

    def write(self, kind: str, /, **fields: Any) -> None:
        """Append one line.

        Args:
            kind: One of `KINDS`.
            fields: Its fields: numbers, texts, paths, dataclasses, NumPy arrays, torch tensors, and lists and
                mappings of those.

        Raises:
            ValueError: The kind is unknown, or a field has the name of one that every line has.
            RunFolderError: The line could not be written whole, and the writer is not patient.
        """
        if kind not in KINDS:
            raise ValueError(f"unknown kind of record line {kind!r}; known: {', '.join(KINDS)}")
        if taken := fields.keys() & {"version", "kind", "time"}:
            raise ValueError(f"the fields {sorted(taken)} are set by the record itself")
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        line = {"version": VERSION, "kind": kind, "time": now, **_plain(fields)}
        text = json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        # Half a surrogate pair (from a file name, say) has no UTF-8, but the escape is JSON's own.
        data = text.encode("utf-8", "backslashreplace") + b"\n"
        self._waiting.append(data)
        try:
            self.flush()
        except RunFolderError as error:
            if not self.patient:
                self._waiting.clear()
                raise
            if not self._warned:
                _log.warning("the record waits for room on the disk, and the run goes on (%s)", error.why)
            self._warned = True

    def flush(self) -> None:
        """Write the lines that wait, the oldest first.

        Raises:
            RunFolderError: The disk does not take them.
        """
        while self._waiting:
            data = b"\n" + self._waiting[0] if self._line_is_cut else self._waiting[0]
            try:
                written = os.write(self._file, data)
            except OSError as error:
                raise _cannot_write(self.path, error) from error
            self._line_is_cut = written < len(data)
            if self._line_is_cut:
                raise _cannot_write(self.path, f"{written} of {len(data)} bytes fitted, so the disk is full")
            self._waiting.popleft()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file >= 0:
            with suppress(RunFolderError):
                self.flush()
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_record(path: Path) -> Record:
    """Read a record, whatever state it is in; a missing file is an empty record.

    After a resume the later line of an update wins, and what was written after the point of resumption is
    void: those updates were lost and done again.

    Raises:
        RunFolderError: The file is there, but cannot be read.
    """
    try:
        with path.open("rb") as file:
            return _collect(file)
    except FileNotFoundError:
        return Record()
    except OSError as error:
        raise RunFolderError(
            f"cannot read the record {path}",
            why=str(error),
            do="check that it is a file and that you may read it",
        ) from error


def _collect(lines: Iterable[bytes]) -> Record:
    """Sort the lines of a record by kind, and drop what a resume made void."""
    starts: list[Line] = []
    events: list[Line] = []
    updates: dict[int, Line] = {}
    evaluations: list[Line] = []
    checkpoints: list[Line] = []
    end: Line | None = None
    damaged = unknown = 0
    for raw in lines:
        if not raw.strip():
            continue
        line = _parse(raw)
        if line is None:
            damaged += 1
            continue
        kind = line["kind"] if line["version"] == VERSION else None
        if kind == "start":
            kept = line.get("resumed_from_update") or 0
            updates = {number: update for number, update in updates.items() if number <= kept}
            evaluations = [evaluation for evaluation in evaluations if evaluation["update"] <= kept]
            checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint["update"] <= kept]
            starts.append(line)
            end = None
        elif kind == "update":
            updates[line["update"]] = line
        elif kind == "evaluation":
            evaluations.append(line)
        elif kind == "checkpoint":
            checkpoints.append(line)
        elif kind == "event":
            events.append(line)
        elif kind == "end":
            end = line
        else:
            unknown += 1
    first = starts[0] if starts else None
    return Record(
        start=next((line for line in reversed(starts) if not line.get("resumed_from_update")), first),
        starts=starts,
        updates=[updates[number] for number in sorted(updates)],
        evaluations=evaluations,
        checkpoints=checkpoints,
        events=events,
        end=end,
        damaged_lines=damaged,
        unknown_lines=unknown,
    )


def _parse(raw: bytes) -> Line | None:
    """One line of the file -> its fields; None if it is damaged."""
    try:
        line = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str) or "version" not in line:
        return None
    if line["version"] != VERSION:
        return line
    if line["kind"] in _COUNTED and not isinstance(line.get("update"), int):
        return None
    if line["kind"] == "start" and not isinstance(line.get("resumed_from_update"), int | None):
        return None
    if line["kind"] == "update":
        line = {name: _number(value) for name, value in line.items()}
    if isinstance(line.get("metrics"), dict):
        line["metrics"] = _number(line["metrics"])
    return line


def _number(value: Any) -> Any:
    """Turn "nan", "inf" and "-inf" back into floats, also inside mappings."""
    if isinstance(value, dict):
        return {name: _number(inner) for name, inner in value.items()}
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    """Replace what JSON cannot say: non-finite floats, paths, dataclasses, arrays and tensors."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return value


def _ends_in_a_cut_line(file: int) -> bool:
    """Whether the last byte of an open file is something other than the end of a line."""
    if os.lseek(file, 0, os.SEEK_END) == 0:
        return False
    os.lseek(file, -1, os.SEEK_END)
    return os.read(file, 1) != b"\n"


def _cannot_write(path: Path, error: OSError | str) -> RunFolderError:
    return RunFolderError(
        f"cannot write the record {path}",
        why=str(error),
        do="free some space and give the same command again: the run continues; or choose another folder",
    )
