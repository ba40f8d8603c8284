"""Tables from files, folders and the hub, and which of their columns mean text and label."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugtune.data.text_files import json_objects, no_rows, read_delimited, read_json
from snugtune.errors import DataError, SnugtuneError, UsageError
from snugtune.hub import hub_errors, is_local

if TYPE_CHECKING:
    from datasets import Dataset

_READABLE = ".csv, .tsv, .jsonl, .ndjson, .json, .parquet (the text formats also with .gz)"
_TEXTS = (
    *("text", "sentence", "content", "review", "comment", "document"),
    *("文本", "内容", "评论", "句子"),
)
_PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("text1", "text2"),
    ("text_a", "text_b"),
)
_LABELS = (
    *("label", "labels", "class", "category", "target", "score", "sentiment"),
    *("标签", "类别", "情感"),
)
_USUAL = {"text": _TEXTS, "labels": _LABELS}
_FLAGS = {
    "text": "--text-column (data.text_column)",
    "text_pair": "--text-pair-column (data.text_pair_column)",
    "labels": "--label-column (data.label_column)",
}


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which columns of a table are used."""

    text: str
    text_pair: str | None
    labels: tuple[str, ...]


def read_table(source: str | Path, *, split: str | None = None, revision: str | None = None) -> Dataset:
    """Read a table; it stays on disk (memory mapped), so it may be larger than memory.

    CSV and TSV cells are text exactly as written: "NA" is a text, an empty cell is the empty text.

    Args:
        source: A .csv, .tsv, .jsonl, .ndjson, .json or .parquet file, a folder saved by `datasets`, or the
            hub id of a data set. What exists on this machine wins.
        split: Which part, where there are several; None takes "train".
        revision: Branch, tag or commit of a hub id.

    Raises:
        DataError: It does not exist, is broken, or has no rows.
        HubError: The hub does not answer or does not have it.
        UsageError: A split was named and there are none.
    """
    path = Path(source).expanduser()
    with quiet_datasets(), _explained(source):
        if path.is_file():
            _refuse_split(split, f"the file {source}")
            table = _read_file(path)
        elif path.is_dir():
            table = _read_folder(path, split)
        elif is_local(source) or _format(path) is not None:
            raise _absent(path)
        else:
            table = _read_hub(str(source), split or "train", revision)
    if len(table) == 0:
        raise no_rows(source)
    return table


def find_columns(
    names: Sequence[str],
    *,
    text: str | None,
    text_pair: str | None,
    labels: Sequence[str] | None,
    where: str,
) -> Columns:
    """Decide which columns hold texts and labels: those asked for, otherwise the usual names.

    Args:
        names: The columns that are there.
        text: Column of the text, if named.
        text_pair: Column of the second text, if named.
        labels: Columns of the label, if named.
        where: The table, for messages.

    Raises:
        UsageError: A named column is not there, one is used twice, or the usual names do not decide.
    """
    asked: dict[str, list[str | None]] = {
        "text": [text],
        "text_pair": [text_pair],
        "labels": [*(labels or [])],
    }
    for role, wanted in asked.items():
        for name in wanted:
            if name is not None and name not in names:
                raise no_column(name, names, role, where)
    taken = {text, text_pair, *(labels or [])}
    free = {name.lower(): name for name in names if name not in taken}
    if not labels and (found := next((free[name] for name in _LABELS if name in free), None)):
        labels = [found]
        del free[found.lower()]
    if text is None:
        text, usual_pair = _usual_texts(free)
        text_pair = text_pair or usual_pair
    if len(names) == 2 and text_pair is None:  # one is known, so the other is the other
        if text is None and labels:
            text = next(name for name in names if name not in labels)
        elif text is not None and not labels:
            labels = [name for name in names if name != text]
    if text is None or not labels:
        role = "labels" if text is not None else "text"
        raise UsageError(
            f"{where}: which column holds the {role.removesuffix('s')} is not clear",
            why=f"its columns are {_listed(names)}; none has a usual name ({_listed(_USUAL[role])})",
            do=f"name it with {_FLAGS[role]}",
        )
    used = [text, *([text_pair] if text_pair else []), *labels]
    if len(set(used)) < len(used):
        raise UsageError(
            f"{where}: a column is used twice: {_listed(used)}",
            why="text, second text and labels are different columns",
            do=f"name others with {', '.join(_FLAGS.values())}",
        )
    return Columns(text=text, text_pair=text_pair, labels=tuple(labels))


def _usual_texts(free: Mapping[str, str]) -> tuple[str | None, str | None]:
    """The text column by its usual name, or the two of a pair."""
    pair = next((pair for pair in _PAIRS if free.keys() >= set(pair)), None)
    single = next((free[name] for name in _TEXTS if name in free and name not in (pair or ())), None)
    if single is None and pair is not None:
        return free[pair[0]], free[pair[1]]
    return single, None


def no_column(name: str, names: Sequence[str], role: str, where: str) -> UsageError:
    """The error for a column that is not there.

    Args:
        name: The column.
        names: The columns that are there.
        role: What it is for: "text", "text_pair" or "labels".
        where: The table, for messages.
    """
    lower = {known.lower(): known for known in names}
    near = [lower[found] for found in get_close_matches(name.lower(), lower, n=1)]
    return UsageError(
        f"{where} has no column {name!r}",
        why=f"its columns are {_listed(names)}",
        do=(f"did you mean {near[0]!r}? " if near else "") + f"name one of them with {_FLAGS[role]}",
    )


def cells_as_written(source: str | Path) -> Iterator[dict[str, Any]] | None:
    """The rows of a source in its order, where `read_table` changes cells; None where it does not.

    Args:
        source: What `read_table` has read.
    """
    path = Path(source).expanduser()
    return json_objects(path) if path.is_file() and _format(path) == "json" else None


def _read_file(path: Path) -> Dataset:
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
        return Dataset.from_parquet(glob.escape(str(path.absolute())))
    return read_json(path) if kind == "json" else read_delimited(path, kind)


def _format(path: Path) -> str | None:
    """How a file is read, by its name: "parquet", "json", or the delimiter; None if it is unknown."""
    name = path.name.lower()
    if name.endswith(".parquet"):
        return "parquet"
    name = name.removesuffix(".gz")
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return "json"
    return {".csv": ",", ".tsv": "\t"}.get(name[-4:])


def _read_folder(path: Path, split: str | None) -> Dataset:
    from datasets import Dataset, load_from_disk

    if not (path / "dataset_dict.json").is_file() and not (path / "dataset_info.json").is_file():
        files = sorted(file.name for file in path.iterdir() if _format(file) is not None)
        raise DataError(
            f"{path} is a folder, but not one saved by datasets.Dataset.save_to_disk",
            why=f"it has data files: {_listed(files)}" if files else "it has no data files either",
            do="name one file" if files else "name a file or another folder",
        )
    table = load_from_disk(str(path))
    if isinstance(table, Dataset):
        _refuse_split(split, f"the folder {path}")
        return table
    if (split or "train") not in table:
        raise DataError(
            f"{path} has no split {split or 'train'!r}",
            why=f"its splits are {_listed(table)}",
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
    do = f"did you mean {_listed(near)}?" if near else "check the spelling and the folder"
    return DataError(f"{path} does not exist", why=why, do=do)


def _listed(names: Iterable[str], limit: int = 12) -> str:
    names = list(names)
    return ", ".join(map(str, names[:limit])) + (
        f" and {len(names) - limit} more" if len(names) > limit else ""
    )


def _short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join([type(error).__name__ + ":", *lines[:3]])[:400]
