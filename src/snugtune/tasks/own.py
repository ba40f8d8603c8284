"""A model of somebody's own: their module, their batches, their loss, through the same loop."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import nn

from snugtune.config import EVERYDAY, RunConfig
from snugtune.data.batching import Batch, Examples, Row
from snugtune.errors import DataError, ModelError, UsageError
from snugtune.tasks import Metrics, Prepared, Task, mean_loss, stack_rows
from snugtune.tasks.own_data import SHAPES, Columns, DataSet, open_rows, places, set_aside

# What a task of one's own does by itself: arguments of `train`, and settings.
_USELESS_ARGUMENTS = ("model", "text_column", "text_pair_column", "label_column", "max_length")
_USELESS_SETTINGS = {
    "model": ("revision", "trust_remote_code", "allow_pickle"),
    "data": (
        *("train_split", "validation_split", "revision", "text_column", "text_pair_column", "label_column"),
        *("label_kind", "label_separator", "max_length"),
    ),
    "training": ("class_weights",),
}


def in_names(
    *, task: Any, data: Any = None, validation: Any = None, **everyday: Any
) -> tuple[dict[str, Any], dict[str, str], Callable[[RunConfig], Prepared]]:
    """What `train` was given, as a run file could say it: it can only name things.

    Args:
        task: The task.
        data: What to learn from.
        validation: What only measures.
        everyday: The other arguments of `train`.

    Returns:
        Everyday settings with the task's name in place of things; digests of the data; what prepares them.

    Raises:
        DataError, UsageError: The task or the data cannot be used, or an argument has no effect.
    """
    check_task(task, data, everyday)
    rows = open_rows(data, "data")
    measured = None if validation is None else open_rows(validation, "validation")
    given = {"data": rows, **({} if measured is None else {"validation": measured})}
    named = {**everyday, "task": "own", **dict.fromkeys(("model", *given), task.name)}
    digests = {EVERYDAY[name]: table.digest() for name, table in given.items()}
    return named, digests, partial(prepare, task=task, data=rows, validation=measured)


def check_task(task: Any, data: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse what is no task, or has no data, and arguments that nothing would read.

    Args:
        task: The task.
        data: What to learn from.
        arguments: The other arguments of `train`.

    Raises:
        UsageError: It is none.
    """
    if not isinstance(task, Task):
        raise UsageError(
            f"task cannot be a {type(task).__name__}",
            why="it is the name of a task, or a snugtune.Task",
            do="give snugtune.Task(build_model=..., loss=...)",
        )
    if data is None:
        raise UsageError("data is not given", why="there is nothing to learn from", do=f"give {SHAPES}")
    for name in _USELESS_ARGUMENTS:
        if arguments.get(name) is not None:
            raise _useless(name)


def prepare(
    config: RunConfig, *, task: Task, data: Columns | DataSet, validation: Columns | DataSet | None = None
) -> Prepared:
    """Check a person's own task and settings, and put them into the shape of every other task's.

    Args:
        config: The run's configuration.
        task: The task.
        data: What to learn from.
        validation: What only measures; None sets a part of `data` aside.

    Raises:
        DataError: There are too few rows, or they have no length, or lack a column.
        UsageError: A setting has no effect, or the metric is not measured.
    """
    _check_settings(config, task, validation)
    task = _checked(task, config.evaluation.metric or task.metric)
    train = _examples(data, task, "data")
    if validation is None:
        train, measured = set_aside(
            train, fraction=config.data.validation_fraction, seed=config.training.seed
        )
        notes = [f"{len(train):,} rows to learn from, {len(measured):,} rows set aside to measure on"]
    else:
        if task.measure is mean_loss:
            _check_columns(data, validation)
        measured = _examples(validation, task, "validation")
        notes = [f"{len(train):,} rows to learn from, {len(measured):,} rows to measure on"]
    best = "smallest" if task.smaller_is_better else "largest"
    return Prepared(
        task=task,
        train=train,
        validation=measured,
        facts={
            "columns": data.names,
            "label_names": [],
            "rows": {"train": len(train), "validation": len(measured)},
        },
        notes=[*notes, f"the best model is the one with the {best} {task.metric}"],
        places=partial(places, train.rows),
    )


def _check_settings(config: RunConfig, task: Task, validation: Any) -> None:
    """Refuse settings that nothing would read."""
    for group, names in _USELESS_SETTINGS.items():
        settings = getattr(config, group)
        for name in names:
            if getattr(settings, name) != type(settings).model_fields[name].default:
                raise _useless(f"{group}.{name}")
    for name, value, named in (
        ("task", config.task, "own"),
        ("model.name", config.model.name, task.name),
        ("data.train", config.data.train, task.name),
        ("data.validation", config.data.validation, None if validation is None else task.name),
    ):
        if value != named:
            raise _useless(name)


def _check_columns(data: Columns | DataSet, validation: Columns | DataSet) -> None:
    """Refuse validation data without a column that the loss may read, before anything is learnt."""
    missing = [name for name in data.names if name not in validation.names]
    if missing:
        raise DataError(
            f"validation has no column {missing[0]!r}",
            why=f"data has {', '.join(data.names)}; validation has {', '.join(validation.names)}",
            do="give both the same columns: the loss is measured on validation",
        )


def _useless(name: str) -> UsageError:
    return UsageError(
        f"{name} has no effect on a task of one's own",
        why="the model, the data and the loss are those that the program gives",
        do="leave it out; what it would do belongs into the functions of the task",
    )


def _checked(task: Task, metric: str) -> Task:
    """The task with a look at everything that its functions return."""
    if task.measure is mean_loss:
        if metric != "loss":
            raise UsageError(
                f"the metric {metric!r} is not measured",
                why="without `outputs` and `measure` a task measures its loss alone",
                do="give both to the task, or leave the metric out",
            )
        changes: dict[str, Any] = {"outputs": None, "measure": None}  # made anew, of the checked loss
    else:
        changes = {
            "outputs": partial(_checked_outputs, outputs=task.outputs),
            "measure": partial(_checked_metrics, measure=task.measure, metric=metric),
        }
    if metric != task.metric:
        changes["smaller_is_better"] = None  # what the task says is about its own metric
    return dataclasses.replace(
        task,
        build_model=partial(_checked_model, build_model=task.build_model),
        loss=partial(_checked_loss, loss=task.loss),
        collate=partial(_checked_batch, collate=task.collate),
        metric=metric,
        **changes,
    )


class _Named(dict[str, torch.Tensor]):
    """A batch that says what it has when it is asked for something else."""

    def __missing__(self, name: str) -> torch.Tensor:
        raise DataError(
            f"a batch has no {name!r}",
            why=f"it has {', '.join(map(repr, self))}",
            do="give the data, and the validation data, that column, or let `collate` of the task make it",
        )


def _checked_model(*, build_model: Callable[[], Any]) -> nn.Module:
    model = build_model()
    if not isinstance(model, nn.Module):
        raise ModelError(
            "`build_model` of the task must return a torch.nn.Module",
            why=f"it returned {_show(model)}",
            do="let it return the module",
        )
    return model


def _checked_loss(
    model: nn.Module, batch: Batch, *, loss: Callable[[nn.Module, Batch], Any]
) -> tuple[torch.Tensor, torch.Tensor | float]:
    answer = loss(model, _Named(batch))
    total, count = answer if isinstance(answer, tuple) and len(answer) == 2 else (None, None)
    one = isinstance(count, Real) or (isinstance(count, torch.Tensor) and count.numel() == 1)
    if not (isinstance(total, torch.Tensor) and total.ndim == 0 and one):
        raise ModelError(
            "the loss of the task must return two things: the sum of the losses, and how many there are",
            why=f"it returned {_show(answer)}; the first is a tensor without dimensions, the second a number "
            "(a mean of each pass would weight the samples of small passes more)",
            do='such as: return F.cross_entropy(answers, labels, reduction="sum"), len(labels)',
        )
    if torch.is_grad_enabled() and not total.requires_grad and bool(count):
        raise ModelError(
            "the loss of the task has no gradient",
            why="it does not depend on a parameter that learns, or was detached on the way",
            do="compute it from the answers of the model, without torch.no_grad, .detach() and .item()",
        )
    return total, count.detach().reshape(()) if isinstance(count, torch.Tensor) else float(count)  # type: ignore[arg-type]


def _checked_outputs(
    model: nn.Module, batch: Batch, *, outputs: Callable[[nn.Module, Batch], Any]
) -> dict[str, torch.Tensor]:
    answer = outputs(model, _Named(batch))
    rows = len(next(iter(batch.values())))
    if fault := _fault(answer, rows):
        raise ModelError(
            f"`outputs` of the task must return a dictionary of tensors with {rows} rows each",
            why=f"{fault}; the batch has {rows} rows",
            do='such as: return {"answers": model(batch["x"]), "labels": batch["y"]}',
        )
    return dict(answer)


def _checked_metrics(
    outputs: dict[str, torch.Tensor], *, measure: Callable[[dict[str, torch.Tensor]], Any], metric: str
) -> Metrics:
    answer = measure(outputs)
    if not isinstance(answer, Mapping):
        raise ModelError(
            "`measure` of the task must return a dictionary of scores",
            why=f"it returned {_show(answer)}",
            do=f"such as: return {{{metric!r}: 0.9}}",
        )
    metrics = {str(name): _plain(value, name) for name, value in answer.items()}
    if metric not in metrics:
        raise ModelError(
            f"`measure` of the task returned no {metric!r}, which names the best model",
            why=f"it returned {', '.join(map(repr, metrics)) or 'nothing'}",
            do="name one of these in `metric` of the task",
        )
    for name in {metric, "loss"} & metrics.keys():
        if not isinstance(metrics[name], (int, float)):
            raise ModelError(
                f"the score {name!r} must be a number",
                why=f"`measure` of the task returned {_show(answer[name])}",
                do="return a number, or give it another name",
            )
        metrics[name] = float(metrics[name])
    return metrics


def _plain(value: Any, name: Any) -> Any:
    """A score as the record takes it: numbers, texts, lists and dictionaries."""
    try:
        return json.loads(json.dumps(value, default=operator.methodcaller("tolist")))
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"the score {name!r} cannot be written into the record",
            why=f"`measure` of the task returned {_show(value)} ({error})",
            do="return numbers, texts, lists and dictionaries, or arrays of numbers",
        ) from error


def _checked_batch(rows: Sequence[Row], *, collate: Callable[[Sequence[Row]], Any]) -> Batch:
    do = "let `collate` of the task return such a dictionary"
    if collate is stack_rows:
        do = 'give the task a `collate`; with datasets, data.with_format("torch") makes tensors of lists'
    try:
        batch = collate(rows)
    except (TypeError, ValueError, RuntimeError, LookupError) as error:
        if collate is not stack_rows:
            raise
        names = sorted({", ".join(map(repr, row)) for row in rows})
        raise DataError(
            "the rows of a batch cannot be stacked",
            why=f"one has {names[0]}, another {names[-1]}"
            if len(names) > 1
            else " ".join(str(error).split()),
            do="give every row the same names, and arrays of the same shape; or " + do,
        ) from error
    if fault := _fault(batch, len(rows)):
        raise DataError(
            f"a batch must be a dictionary of tensors with {len(rows)} rows each", why=fault, do=do
        )
    return dict(batch)


def _fault(parts: Any, rows: int) -> str | None:
    """Why something is no dictionary of tensors with so many rows; None if it is one."""
    if not isinstance(parts, Mapping) or not parts:
        return f"it is {_show(parts)}"
    for name, part in parts.items():
        if not isinstance(part, torch.Tensor) or part.shape[:1] != (rows,):
            return f"{name!r} is {_show(part)}"
    return None


def _show(thing: Any) -> str:
    """What kind of thing a function returned."""
    if isinstance(thing, torch.Tensor):
        return f"a tensor of shape {list(thing.shape)}"
    if isinstance(thing, tuple):
        return f"({', '.join(map(_show, thing))})"
    return "nothing" if thing is None else f"a value of type {type(thing).__name__}"


def _examples(rows: Columns | DataSet, task: Task, name: str) -> Examples:
    lengths = np.ones(len(rows), dtype=np.int64)
    if task.length is not None:
        for number in range(len(rows)):
            length = task.length(rows.__getitems__([number])[0])
            try:
                lengths[number] = operator.index(length)
            except TypeError as error:
                raise DataError(
                    f"row {number} of {name} has no length",
                    why=f"`length` of the task returned {_show(length)}",
                    do="let it return a whole number",
                ) from error
    return Examples(rows, lengths)
