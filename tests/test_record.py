"""The record keeps every whole line, whatever happened to the file."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import threading
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import numpy
import pytest
import torch

from snugtune.errors import RunFolderError
from snugtune.record import KINDS, Record, RecordWriter, read_record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "record.jsonl"


def write_updates(path: Path, numbers: range, loss: float = 1.0) -> None:
    with RecordWriter(path) as record:
        for number in numbers:
            record.write("update", update=number, loss=loss)


def test_what_was_written_is_read(path: Path) -> None:
    with RecordWriter(path) as record:
        record.write("start", run_id="a", resumed_from_update=None, decisions=[{"name": "precision"}])
        record.write("update", update=1, loss=0.5, process_bytes=None)
        record.write("evaluation", update=1, metrics={"accuracy": 0.75}, best=True)
        record.write("checkpoint", update=1, path=Path("checkpoints") / "1", why="end of epoch")
        record.write("event", what="out of memory", why="batch", do="nothing")
        record.write("end", status="finished", metrics={"accuracy": 0.75})
    found = read_record(path)
    assert found.start is not None
    assert found.start["decisions"] == [{"name": "precision"}]
    assert [update["loss"] for update in found.updates] == [0.5]
    assert found.updates[0]["process_bytes"] is None
    assert found.evaluations[0]["metrics"] == {"accuracy": 0.75}
    assert found.checkpoints[0]["path"] == str(Path("checkpoints") / "1")
    assert found.events[0]["what"] == "out of memory"
    assert found.end is not None
    assert found.end["status"] == "finished"
    assert (found.damaged_lines, found.unknown_lines) == (0, 0)


def test_every_line_has_version_kind_and_the_time_in_utc(path: Path) -> None:
    before = datetime.now(timezone.utc)
    with RecordWriter(path) as record:
        for kind in KINDS:
            record.write(kind, update=1)
    for line, kind in zip(path.read_text("utf-8").splitlines(), KINDS, strict=True):
        fields = json.loads(line)
        assert (fields["version"], fields["kind"]) == (1, kind)
        written = datetime.fromisoformat(fields["time"])
        assert written.utcoffset() is not None
        assert abs((written - before).total_seconds()) < 60


def test_a_missing_file_is_an_empty_record(path: Path) -> None:
    assert read_record(path) == Record()


@pytest.mark.parametrize("keep", [1, 10, -1], ids=["one byte", "ten bytes", "all but the line end"])
def test_a_line_cut_at_the_end_costs_at_most_itself(path: Path, keep: int) -> None:
    write_updates(path, range(1, 3))
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:keep])
    whole = 2 if keep == -1 else 1
    assert len(read_record(path).updates) == whole
    write_updates(path, range(3, 4))
    found = read_record(path)
    assert [update["update"] for update in found.updates] == [*range(1, whole + 1), 3]
    assert found.damaged_lines == 2 - whole


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00" * 100,
        b"hello",
        b"[1, 2]",
        b"[" * 100_000,
        b"\xff\xfe{}",
        b'{"version": 1}',
        b'{"version": 1, "kind": "update", "update": "three"}',
        b'{"version": 1, "kind": "evaluation"}',
        b'{"version": 1, "kind": "start", "resumed_from_update": "x"}',
        b'{"kind": "update", "update": 2}',
    ],
)
def test_garbage_between_lines_is_counted_and_skipped(path: Path, garbage: bytes) -> None:
    write_updates(path, range(1, 2))
    with path.open("ab") as file:
        file.write(garbage + b"\n\n")
    write_updates(path, range(2, 3))
    found = read_record(path)
    assert [update["update"] for update in found.updates] == [1, 2]
    assert found.damaged_lines == 1


def test_unknown_kinds_and_versions_are_counted_and_skipped(path: Path) -> None:
    write_updates(path, range(1, 2))
    with path.open("a", encoding="utf-8") as file:
        file.write('{"version": 1, "kind": "finding", "what": "x"}\n')
        file.write('{"version": 2, "kind": "update", "update": {"number": 1}}\r\n')
    found = read_record(path)
    assert len(found.updates) == 1
    assert (found.damaged_lines, found.unknown_lines) == (0, 2)


def test_after_a_resume_the_later_line_of_an_update_wins_and_lost_work_is_void(path: Path) -> None:
    with RecordWriter(path) as record:
        record.write("start", run_id="a", resumed_from_update=None)
        for number in range(1, 8):
            record.write("update", update=number, loss=1.0)
        record.write("evaluation", update=3, metrics={})
        record.write("evaluation", update=6, metrics={})
        record.write("checkpoint", update=3, path="3")
        record.write("checkpoint", update=6, path="6")
        record.write("event", what="the process was killed")
        record.write("end", status="interrupted")
    with RecordWriter(path) as record:
        record.write("start", run_id="a", resumed_from_update=3)
    found = read_record(path)
    assert [update["update"] for update in found.updates] == [1, 2, 3]
    assert [evaluation["update"] for evaluation in found.evaluations] == [3]
    assert [checkpoint["update"] for checkpoint in found.checkpoints] == [3]
    assert len(found.events) == 1
    assert found.end is None
    write_updates(path, range(4, 6), loss=2.0)
    found = read_record(path)
    assert [update["loss"] for update in found.updates] == [1.0, 1.0, 1.0, 2.0, 2.0]
    assert len(found.starts) == 2
    assert found.start == found.starts[0]


def test_the_later_line_of_an_update_wins_without_a_start_too(path: Path) -> None:
    write_updates(path, range(1, 4))
    write_updates(path, range(2, 3), loss=5.0)
    assert [update["loss"] for update in read_record(path).updates] == [1.0, 5.0, 1.0]


def test_a_start_from_the_beginning_voids_everything_before_it(path: Path) -> None:
    for _ in range(2):
        with RecordWriter(path) as record:
            record.write("start", run_id="a", resumed_from_update=None)
        assert read_record(path).updates == []
        write_updates(path, range(1, 4))


def test_numbers_that_json_lacks_come_back_as_floats(path: Path) -> None:
    with RecordWriter(path) as record:
        record.write("update", update=1, loss=math.nan, grad_norm=math.inf, learning_rate=-math.inf)
        record.write(
            "evaluation", update=1, metrics={"pearson": math.nan, "per_class": {"nan": {"f1": math.nan}}}
        )
        record.write("start", labels=["nan", "inf"], resumed_from_update=1)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    for line in path.read_text("utf-8").splitlines():
        json.loads(line, parse_constant=refuse)
    found = read_record(path)
    update, metrics = found.updates[0], found.evaluations[0]["metrics"]
    assert math.isnan(update["loss"])
    assert (update["grad_norm"], update["learning_rate"]) == (math.inf, -math.inf)
    assert math.isnan(metrics["pearson"])
    assert math.isnan(metrics["per_class"]["nan"]["f1"])
    assert found.start is not None
    assert found.start["labels"] == ["nan", "inf"]  # names of labels stay names


def test_scalars_and_arrays_of_numpy_and_torch_are_written_as_numbers(path: Path) -> None:
    with RecordWriter(path) as record:
        record.write(
            "update",
            update=numpy.int64(1),
            loss=numpy.float32(0.5),
            grad_norm=torch.tensor(math.inf),
            table=numpy.array([[1, 2], [3, 4]]),
        )
    update = read_record(path).updates[0]
    assert (update["update"], update["loss"], update["grad_norm"]) == (1, 0.5, math.inf)
    assert update["table"] == [[1, 2], [3, 4]]


@pytest.mark.parametrize("text", ["好评", "line\nbreak", "\u2028\x85\r", "\udc80", "\N{PILE OF POO}", '"\\'])
def test_any_text_survives_and_stays_on_its_line(path: Path, text: str) -> None:
    with RecordWriter(path) as record:
        record.write("event", what=text)
    assert path.read_bytes().count(b"\n") == 1
    assert read_record(path).events[0]["what"] == text


def test_an_unknown_kind_is_refused_and_nothing_is_written(path: Path) -> None:
    with RecordWriter(path) as record:
        with pytest.raises(ValueError, match="'updates'"):
            record.write("updates", update=1)
        with pytest.raises(ValueError, match="time"):
            record.write("update", update=1, time=3.0)
    assert path.read_bytes() == b""


def test_a_folder_that_is_missing_is_an_error_a_person_can_act_on(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError) as caught:
        RecordWriter(tmp_path / "missing" / "record.jsonl")
    assert "missing" in caught.value.what
    assert caught.value.do


def test_a_record_that_is_a_folder_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="cannot read the record"):
        read_record(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_a_full_disk_is_an_error_a_person_can_act_on() -> None:
    with RecordWriter(Path("/dev/full")) as record, pytest.raises(RunFolderError) as caught:
        record.write("update", update=1)
    assert os.strerror(errno.ENOSPC) in caught.value.why
    assert "space" in caught.value.do


def run_with_a_size_limit(path: Path, size_bytes: int) -> None:
    """Write two lines in a process whose files may not grow past a size, then a third without that limit."""
    code = """if True:
        import resource, signal, sys
        from pathlib import Path
        from snugtune.errors import RunFolderError
        from snugtune.record import RecordWriter
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        with RecordWriter(Path(sys.argv[1])) as record:
            record.write("update", update=1)
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), hard))
            try:
                record.write("update", update=2)
            except RunFolderError as error:
                print(error.why)
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            record.write("update", update=3)
    """
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(size_bytes)], capture_output=True, text=True, check=True
    )
    assert "the disk is full" in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files through setrlimit")
def test_a_line_that_fits_in_part_is_an_error_and_leaves_the_next_line_whole(path: Path) -> None:
    write_updates(path, range(1, 2))
    run_with_a_size_limit(path, size_bytes=2 * path.stat().st_size + 20)
    found = read_record(path)
    assert [update["update"] for update in found.updates] == [1, 3]
    assert found.damaged_lines == 1


def test_a_killed_process_loses_no_line(path: Path) -> None:
    code = """if True:
        import os, sys
        from pathlib import Path
        from snugtune.record import RecordWriter
        record = RecordWriter(Path(sys.argv[1]))
        for number in range(1, 101):
            record.write("update", update=number)
        os._exit(9)
    """
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == 9
    assert [update["update"] for update in read_record(path).updates] == list(range(1, 101))


def test_two_writers_never_mix_their_lines(path: Path) -> None:
    threads = [
        threading.Thread(target=write_updates, args=(path, range(start, start + 300))) for start in (1, 301)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read_record(path)
    assert [update["update"] for update in found.updates] == list(range(1, 601))
    assert found.damaged_lines == 0


def test_a_closed_writer_can_be_closed_again(path: Path) -> None:
    record = RecordWriter(path)
    record.close()
    record.close()
    with pytest.raises(RunFolderError):
        record.write("event", what="too late")


def test_tuples_and_dataclasses_are_written_as_lists_and_mappings(path: Path) -> None:
    class Pair(NamedTuple):
        name: str
        value: float

    with RecordWriter(path) as record:
        record.write("event", what=Pair("a", math.inf), why=Record(damaged_lines=2))
    event = read_record(path).events[0]
    assert event["what"] == ["a", "inf"]
    assert event["why"]["damaged_lines"] == 2
