"""One answer for each text or pair of texts: a class, several classes, or a number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from snugtune.config import RunConfig
from snugtune.data.batching import Batch, Examples
from snugtune.data.checked_table import CheckedTable
from snugtune.data.checking import check_data
from snugtune.data.columns import Columns
from snugtune.data.labels import Labels
from snugtune.data.splits import split_rows
from snugtune.errors import UsageError
from snugtune.tasks import Prepared, Task
from snugtune.tasks.caching import without_cache
from snugtune.tasks.pretrained import load_config, load_model, load_tokenizer, save_model, token_limit
from snugtune.tasks.scores import measure, metric_names
from snugtune.tasks.tokens import Padding, TokenRows, check_limit, check_vocabulary, tokenise
from snugtune.units import show_count

_PROBLEM_TYPES = {
    "single-label": "single_label_classification",
    "multi-label": "multi_label_classification",
    "regression": "regression",
}
_DEFAULT_METRICS = {"single-label": "accuracy", "multi-label": "micro_f1", "regression": "mse"}


def prepare(config: RunConfig) -> Prepared:
    """Read, check and encode the data, and build the task.

    Raises:
        DataError, ModelError, HubError, UsageError: Data, model or settings cannot be used as asked.
    """
    data = check_data(config.data)
    columns, labels, answers = data.columns, data.labels, data.answers
    tables = {where: checked.table for where, checked in data.tables.items()}
    learnt = np.arange(len(tables["train"]))
    if "validation" not in tables:
        learnt, aside = split_rows(
            answers["train"],
            rows=len(learnt),
            fraction=config.data.validation_fraction,
            seed=config.training.seed,
            kind=labels.kind,
            digests=data.digests["train"],
        )
        tables = {"train": tables["train"].select(learnt), "validation": tables["train"].select(aside)}
        answers = {"train": answers["train"][learnt], "validation": answers["train"][aside]}
    tokenizer = load_tokenizer(config.model)
    model_config = load_config(config.model)
    limit = min(config.data.max_length, token_limit(tokenizer, model_config))
    check_limit(limit, tokenizer, texts=len(columns.texts))
    task = build_task(config, labels, tokenizer, limit, answers["train"])
    encoded = {
        where: tokenise(table, columns.texts, tokenizer, limit=limit) for where, table in tables.items()
    }
    check_vocabulary([table for table, _, _ in encoded.values()], tokenizer, model_config)
    examples = {
        where: Examples(TokenRows(rows, answers[where]), lengths)
        for where, (rows, lengths, _) in encoded.items()
    }
    cut = {where: share for where, (_, _, share) in encoded.items()}
    return Prepared(
        task=task,
        train=examples["train"],
        validation=examples["validation"],
        facts={
            "columns": {"text": columns.text, "text_pair": columns.text_pair, "labels": list(columns.labels)},
            "model_type": model_config.model_type,
            "label_kind": labels.kind,
            "label_names": list(labels.names),
            "rows": {where: len(table) for where, table in tables.items()},
            "max_length": limit,
            "share_cut_off": cut,
            "read": {where: checked.facts() for where, checked in data.tables.items()},
            "findings": [asdict(finding) for finding in data.findings],
        },
        notes=[*data.notes(), *_notes(config, columns, labels, tables, limit, cut["train"])],
        places=lambda rows: _places(data.tables["train"], learnt[list(rows)].tolist()),
    )


def build_task(
    config: RunConfig,
    labels: Labels,
    tokenizer: Any,
    limit: int,
    answers: np.ndarray | None,
    *,
    new_head: bool = True,
) -> Task:
    """The task without its data.

    Args:
        config: The run's configuration.
        labels: What the model answers.
        tokenizer: The model's tokenizer.
        limit: Longest text in tokens.
        answers: The training data's encoded labels, for balanced class weights; None without training data.
        new_head: Whether the model's head may be new, to be trained.

    Raises:
        UsageError: A metric or class weight that this kind of labels does not have.
    """
    metric = config.evaluation.metric or _DEFAULT_METRICS[labels.kind]
    if metric not in metric_names(labels.kind):
        raise UsageError(
            f"evaluation.metric cannot be {metric!r}",
            why=f"{labels.kind} labels are measured by {', '.join(metric_names(labels.kind))}",
            do="name one of these, or leave it out",
        )
    weights = _class_weights(config, labels, answers)
    return Task(
        name="sequence-classification",
        build_model=partial(_build_model, config, labels, tokenizer, new_head=new_head),
        collate=Padding(tokenizer),
        loss=partial(_loss, kind=labels.kind, weights=weights),
        outputs=_outputs,
        measure=partial(measure, kind=labels.kind, names=labels.names),
        example_batch=partial(_example_batch, labels, tokenizer),
        metric=metric,
        save=partial(save_model, tokenizer=tokenizer, limit=limit),
    )


def _places(checked: CheckedTable, rows: Sequence[int]) -> list[str]:
    """What people call rows of a table (from 0): file and line, or file and number where it has no lines."""
    ascending = sorted(rows)
    lines = checked.lines_of(ascending)
    if len(lines) < len(ascending):
        return [f"{checked.reading.source}, row {row + 1}" for row in rows]
    line_of = dict(zip(ascending, lines, strict=True))
    return [f"{checked.reading.source}, line {line_of[row]}" for row in rows]


def _build_model(config: RunConfig, labels: Labels, tokenizer: Any, *, new_head: bool = True) -> nn.Module:
    from transformers import AutoModelForSequenceClassification

    names = labels.names or ("value",)
    model: Any = load_model(
        AutoModelForSequenceClassification,
        config.model,
        new_head=new_head,
        num_labels=len(names),
        id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
        problem_type=_PROBLEM_TYPES[labels.kind],
    )
    # Decoders answer at the last token that is not padding.
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return cast("nn.Module", model)


def _logits(model: nn.Module, batch: Batch) -> torch.Tensor:
    """[rows, classes] in fp32; [rows, 1] for regression."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    configs: Any = [model.config, cast("Any", model.config).get_text_config()]
    with without_cache([config for config in configs if getattr(config, "use_cache", None) is True]):
        logits: torch.Tensor = model(**inputs).logits
    return logits.float()


def _loss(
    model: nn.Module, batch: Batch, *, kind: str, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | float]:
    logits, labels = _logits(model, batch), batch["labels"]
    rows = labels.shape[0]
    if kind == "regression":
        return F.mse_loss(logits.squeeze(-1), labels.float(), reduction="sum"), rows
    weights = None if weights is None else weights.to(logits.device)
    if kind == "multi-label":
        # As the mean over rows and classes, which is what model and pipeline of transformers expect.
        loss = F.binary_cross_entropy_with_logits(logits, labels.float(), weight=weights, reduction="sum")
        return loss, rows * logits.shape[-1]
    loss = F.cross_entropy(logits, labels, weight=weights, reduction="sum")
    return loss, rows if weights is None else weights[labels].sum()


def _outputs(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    outputs = {"logits": _logits(model, batch)}
    if "labels" in batch:
        outputs["labels"] = batch["labels"]
    return outputs


def _example_batch(labels: Labels, tokenizer: Any, rows: int, tokens: int) -> Batch:
    ids = torch.full((rows, tokens), 1 if tokenizer.pad_token_id == 0 else 0, dtype=torch.long)
    # Some models answer at the token that ends the text.
    ids[:, -1] = ids[0, 0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "token_type_ids" in tokenizer.model_input_names:
        batch["token_type_ids"] = torch.zeros_like(ids)
    if labels.kind == "multi-label":
        return {**batch, "labels": torch.zeros(rows, len(labels.names))}
    dtype = torch.float32 if labels.kind == "regression" else torch.long
    return {**batch, "labels": torch.zeros(rows, dtype=dtype)}


def _class_weights(config: RunConfig, labels: Labels, answers: np.ndarray | None) -> torch.Tensor | None:
    """The weight of each class, [classes], or None for equal weights."""
    wanted = config.training.class_weights
    if wanted is None:
        return None
    if labels.kind == "regression":
        raise UsageError(
            "training.class_weights makes no sense here",
            why="the labels are numbers, not classes",
            do="leave it out, or set data.label_kind to single-label",
        )
    if wanted == "balanced":
        if answers is None:
            return None
        counts = (
            answers.sum(axis=0) if answers.ndim == 2 else np.bincount(answers, minlength=len(labels.names))
        )
        # The usual formula: all rows / (classes * rows of the class), so that the mean weight of a row is 1.
        return torch.tensor(len(answers) / (len(counts) * np.maximum(counts, 1)), dtype=torch.float32)
    unknown = sorted(set(wanted) - set(labels.names))
    if unknown:
        raise UsageError(
            f"training.class_weights names the label {unknown[0]!r}, which the training data does not have",
            why=f"its labels are {', '.join(labels.names)}",
            do="use these names; labels that are not named count 1",
        )
    return torch.tensor([wanted.get(name, 1.0) for name in labels.names], dtype=torch.float32)


def _notes(
    config: RunConfig,
    columns: Columns,
    labels: Labels,
    tables: dict[str, Any],
    limit: int,
    share_cut: float,
) -> list[str]:
    pair = f" and {columns.text_pair!r}" if columns.text_pair else ""
    number = "one" if labels.kind == "single-label" else "any"
    answer = f"{number} of {len(labels.names)} labels: {_short(labels.names)}"
    if labels.kind == "regression":
        answer = f"a number from column {columns.labels[0]!r}"
    validation = (
        f"{show_count(len(tables['validation']), 'row')} to measure on"
        if config.data.validation or config.data.validation_split
        else f"{show_count(len(tables['validation']), 'row')} set aside to measure on"
    )
    notes = [
        f"{show_count(len(tables['train']), 'row')} to learn from, {validation}",
        f"text from column {columns.text!r}{pair}; the model learns to answer {answer}",
    ]
    if limit < config.data.max_length:
        notes.append(f"max_length {config.data.max_length} is more than the model takes: {limit} is used")
    if share_cut > 0:
        share = f"{share_cut:.0%}" if share_cut >= 0.01 else "less than 1%"
        rows = len(tables["train"])
        count = f"{round(share_cut * rows):,} of {rows:,} ({share})"
        notes.append(f"{count} of the texts are longer than {limit} tokens and are cut off there")
    return notes


def _short(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, ..."
