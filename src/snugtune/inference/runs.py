"""Finished runs: what their models read and answer."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snugtune.config import RunConfig
from snugtune.data.columns import Columns
from snugtune.data.labels import Labels
from snugtune.errors import ModelError, RunFolderError, UsageError
from snugtune.record import Record, read_record
from snugtune.runfile import load_config
from snugtune.tasks import pretrained

_TASK = "sequence-classification"


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A run whose model can be used.

    Args:
        path: Its folder.
        config: Its configuration, with the finished model in the place of the one it began with.
        columns: The columns of its training data.
        labels: What its model answers.
        max_length: Where its model cuts texts, in tokens.
    """

    path: Path
    config: RunConfig
    columns: Columns
    labels: Labels
    max_length: int


def open_run(path: Path, *, precision: str = "auto") -> FinishedRun:
    """Look into the folder of a finished run.

    Args:
        path: The folder.
        precision: What its configuration shall say in the place of the precision of the training.

    Raises:
        RunFolderError: It is not the folder of a finished run, or its model is not there.
        ModelError: The model there is another one.
        UsageError: There is no such precision.
    """
    _check_folder(path)
    _check_task(path)
    record = read_record(path / "record.jsonl")
    _check_finished(path, record)
    try:
        config = load_config(path / "config.yaml")
        facts = record.starts[-1]["data"]
        names = facts["columns"]
        columns = Columns(text=names["text"], text_pair=names["text_pair"], labels=tuple(names["labels"]))
        labels = Labels(kind=facts["label_kind"], names=tuple(facts["label_names"]))
        limit = int(facts["max_length"])
    except (UsageError, LookupError, TypeError, ValueError) as error:
        raise RunFolderError(
            f"{path} is not a run that can be used like this",
            why=f"{error.what}: {error.why}"
            if isinstance(error, UsageError)
            else f"its record does not say what a run of {_TASK} says",
            do="give the folder of a run that classified texts, made by this version of snugtune",
        ) from error
    config = load_config(path / "config.yaml", settings={"training.precision": precision})
    model = config.model.model_copy(update={"name": str(path.absolute() / "model"), "revision": None})
    _check_model(path, pretrained.load_config(model), labels)
    return FinishedRun(
        path=path,
        config=config.model_copy(update={"model": model}),
        columns=columns,
        labels=labels,
        max_length=limit,
    )


def _check_folder(path: Path) -> None:
    """Refuse what is no run's folder; a near miss is named."""
    if (path / "config.yaml").is_file():
        return
    near = path.parent if (path.parent / "config.yaml").is_file() else None
    inside = sorted(file.parent for file in path.glob("*/config.yaml")) if path.is_dir() else []
    if not path.exists():
        why = "there is no such folder"
    elif path.is_file():
        why = "it is a file"
    else:
        why = "it has no config.yaml"
    do = "give the folder of a finished run, such as runs/reviews"
    if near is not None:
        do = f"give the folder of the run: {near}"
    elif inside:
        do = f"give one of the runs in it: {', '.join(str(folder) for folder in inside[:5])}"
    raise RunFolderError(f"{path} is not the folder of a run", why=why, do=do)


def _check_task(path: Path) -> None:
    """Refuse a model of somebody's own. Settings that cannot be read are another matter, said later."""
    with suppress(UsageError):
        if load_config(path / "config.yaml").task == "own":
            weights = path / "model" / "model.safetensors"
            load = f'load_model(model, "{weights.as_posix()}")'
            raise RunFolderError(
                f"the run in {path} has a model of somebody's own",
                why="only the program that made it can build that model (snugtune.Task)",
                do=f"in that program: from safetensors.torch import load_model; model = build_model(); {load}"
                if weights.is_file()
                else "continue it by the same call of snugtune.train, or load what `save` of the task wrote",
            )


def _check_finished(path: Path, record: Record) -> None:
    status = (record.end or {}).get("status")
    if status != "finished" or not record.starts:
        raise RunFolderError(
            f"the run in {path} is not finished",
            why=f"its record ends with {status!r}"
            if status
            else "its record has no end: it is still running, or crashed",
            do=f"continue it: snugtune train {path / 'config.yaml'} --output {path}",
        )
    if not (path / "model" / "config.json").is_file():
        raise RunFolderError(
            f"the run in {path} has no model",
            why=f"{path / 'model'} is not there or is incomplete",
            do="put the folder back, or train again: "
            f"snugtune train {path / 'config.yaml'} --output {path}-again",
        )


def _check_model(path: Path, model_config: Any, labels: Labels) -> None:
    names = tuple(model_config.id2label[number] for number in sorted(model_config.id2label))
    if names != (labels.names or names[:1]):
        learnt = ", ".join(labels.names[:8]) or "a number"
        raise ModelError(
            f"{path / 'model'} is not the model of this run",
            why=f"it answers {', '.join(names[:8])}; the run learnt {learnt}",
            do="put the run's own model back, or use this one with transformers.pipeline",
        )
