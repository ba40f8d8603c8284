"""Tables from files, folders and the hub."""

from __future__ import annotations

import glob
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugtune.data.binary_files import check_content, read_arrow, refuse_foreign
from snugtune.data.columns import listed
from snugtune.data.delimited import no_rows, read_delimited
from snugtune.data.json_files import json_objects, read_json
from snugtune.data.reading import How, Reading
from snugtune.errors import DataError, SnugtuneError, UsageError
from snugtune.hub import hub_errors, is_local

if TYPE_CHECKING:
    from datasets import Dataset

_READABLE = ".csv, .tsv, .tab, .jsonl, .ndjson, .json, .parquet, .arrow, .feather (text also with .gz)"
_LARGE_BYTES = 1 << 26  # smaller files are read in seconds


def read_table(source: str | Path, *, split: str | None = None, revision: str | None = None) -> Dataset:
    """The table that `open_table` reads.

    Args:
        source: File, folder or hub id.
        split: Which part, where there are several.
        revision: Branch, tag or commit of a hub id.

    Raises:
        DataError, HubError, UsageError: As in `open_table`.
    """
    return open_table(source, split=split, revision=revision).table


def open_table(
    source: str | Path, *, split: str | None = None, revision: str | None = None, how: How | None = None
) -> Reading:
    """Read a table; it stays on disk (memory mapped), so it may be larger than memory.

    CSV and TSV cells are text exactly as written: "NA" is a text, an empty cell is the empty text.

    Args:
        source: A .csv, .tsv, .jsonl, .ndjson, .json, .parquet, .arrow or .feather file, a folder saved by
            `datasets`, or the hub id of a data set. What exists on this machine wins.
        split: Which part, where there are several; None takes "train".
        revision: Branch, tag or commit of a hub id.
        how: What a person wants of the reader of text files.

    Raises:
        DataError: It does not exist, is broken, or has no rows.
        HubError: The hub does not answer or does not have it.
        UsageError: A split was named and there are none.
    """
    path = Path(source).expanduser()
    large = path.is_file() and path.stat().st_size > _LARGE_BYTES and sys.stderr.isatty()
    with quiet_datasets(show_bars=large), _explained(source), _bar(path, how or How(), show=large) as wanted:
        if path.is_file():
            _refuse_split(split, f"the file {source}")
            reading = _read_file(path, wanted)
        elif path.is_dir():
            reading = Reading(source=str(source), table=_read_folder(path, split))
        elif is_local(source) or _format(path) is not None:
            raise _absent(path)
        else:
            table = _read_hub(str(source), split or "train", revision)
            reading = Reading(source=str(source), table=table)
    if len(reading.table) == 0:
        raise no_rows(source)
    return reading


def cells_as_written(source: str | Path, how: How | None = None) -> Iterator[dict[str, Any]] | None:
    """The rows of a source in its order, where `read_table` changes cells; None where it does not.

    Args:
        source: What `read_table` has read.
        how: What a person wanted there.
    """
    path = Path(source).expanduser()
    return json_objects(path, how or How()) if path.is_file() and _format(path) == "json" else None


def _read_file(path: Path, how: How) -> Reading:
    from datasets import Dataset

    kind = _format(path)
    if kind is None:
        raise DataError(
            f"{path} is of a kind that is not read",
            why=f"its name ends in {path.suffix or 'nothing'}; known are {_READABLE}",
            do="save or export it as CSV in UTF-8",
        )
    if path.stat().st_size == 0:
        raise no_rows(path)
    if kind == "parquet":
        table = Dataset.from_parquet(glob.escape(str(path.absolute())))
        check_content(table)
        return Reading(source=str(path), table=table)
    if kind == "arrow":
        return Reading(source=str(path), table=read_arrow(path))
    refuse_foreign(path)
    return read_json(path, how) if kind == "json" else read_delimited(path, how)


def _format(path: Path) -> str | None:
    """How a file is read, by its name: "parquet", "arrow", "json" or "cells"; None if it is unknown."""
    name = path.name.lower()
    if name.endswith((".parquet", ".arrow", ".feather")):
        return "parquet" if name.endswith("t") else "arrow"
    name = name.removesuffix(".gz")
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return "json"
    return "cells" if name.endswith((".csv", ".tsv", ".tab")) else None


def _read_folder(path: Path, split: str | None) -> Dataset:
    from datasets import Dataset, load_from_disk

    if not (path / "dataset_dict.json").is_file() and not (path / "dataset_info.json").is_file():
        files = sorted(file.name for file in path.iterdir() if _format(file) is not None)
        raise DataError(
            f"{path} is a folder, but not one saved by datasets.Dataset.save_to_disk",
            why=f"it has data files: {listed(files)}" if files else "it has no data files either",
            do="name one file" if files else "name a file or another folder",
        )
    table = load_from_disk(str(path))
    if isinstance(table, Dataset):
        _refuse_split(split, f"the folder {path}")
        return table
    if (split or "train") not in table:
        raise DataError(
            f"{path} has no split {split or 'train'!r}",
            why=f"its splits are {listed(table)}",
            do="name one of them (data.train_split, data.validation_split)",
        )
    return table[split or "train"]


def _read_hub(name: str, split: str, revision: str | None) -> Dataset:
    from datasets import load_dataset

    with hub_errors(name, kind="data set"):
        try:
            return load_dataset(name, split=split, revision=revision)
        except ValueError as error:
            if "Config name is missing" not in str(error):
                raise
            raise DataError(
                f"the data set {name!r} on the hub has several parts",
                why=_short(error),
                do="choose one in Python and give the folder: "
                f'datasets.load_dataset("{name}", "PART").save_to_disk("FOLDER")',
            ) from error


@contextmanager
def _bar(path: Path, how: How, *, show: bool) -> Iterator[How]:
    """A bar for the pass over a large file, and `how` with a function that moves it."""
    if not show:
        yield how
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as Rate

    name = TextColumn("checking {task.description}")
    columns = (name, BarColumn(), DownloadColumn(), Rate(), TimeRemainingColumn())
    # Rich's refreshing thread is not used, and neither are its traps for other output.
    bar = Progress(
        *columns,
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task = bar.add_task(path.name, total=path.stat().st_size)
    with bar:
        yield replace(how, on_bytes=lambda done, size: bar.update(task, completed=done, refresh=True))


@contextmanager
def quiet_datasets(*, show_bars: bool = False) -> Iterator[None]:
    """No progress bars and no log lines of `datasets` inside the block."""
    import datasets
    from datasets.utils import logging

    bars, level = not datasets.are_progress_bars_disabled() and not show_bars, logging.get_verbosity()
    if bars:
        datasets.disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()


@contextmanager
def _explained(source: str | Path) -> Iterator[None]:
    """Turn whatever the reading libraries raise into an error with what, why and do."""
    try:
        yield
    except SnugtuneError:
        raise
    except Exception as error:
        from datasets import config

        cause = error.__cause__ or error
        cache = str(config.HF_DATASETS_CACHE)
        if isinstance(cause, OSError) and str(cause.filename or "").startswith(cache):
            raise DataError(
                f"{source} could not be prepared in the cache folder {cache}",
                why=_short(cause),
                do="make room or allow writing there, or set HF_HOME to another folder",
            ) from error
        raise DataError(
            f"{source} could not be read", why=_short(cause), do="check that it is complete and of this kind"
        ) from error


def _refuse_split(split: str | None, what: str) -> None:
    if split not in (None, "train"):
        raise UsageError(
            f"{what} has no split {split!r}",
            why="it is a single table",
            do="leave the split out, or name another source",
        )


def _absent(path: Path) -> DataError:
    near: list[str] = []
    if path.parent.is_dir():
        near = get_close_matches(path.name, [file.name for file in path.parent.iterdir()])
        why = f"the folder {path.parent.absolute()} does not have it"
    else:
        why = f"there is no folder {path.parent.absolute()} either"
    do = f"did you mean {listed(near)}?" if near else "check the spelling and the folder"
    return DataError(f"{path} does not exist", why=why, do=do)


def _short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join([type(error).__name__ + ":", *lines[:3]])[:400]
