"""The model card: what a model was trained on, how, and how good it is."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from snugtune.config import RunConfig
from snugtune.units import show_count

_PIPELINES = {"sequence-classification": "text-classification"}


def write_card(
    folder: Path, config: RunConfig, *, used_as: Path, facts: dict[str, Any], metrics: dict[str, Any]
) -> None:
    """Write README.md of a finished model.

    Args:
        folder: Where to write it.
        config: The run's configuration.
        used_as: The model's folder for those who use it.
        facts: What was found in the data.
        metrics: Scores on the validation data.
    """
    training = config.training
    rows = facts["rows"]
    pipeline = _PIPELINES.get(config.task)
    lines = [
        *(_own_head(config) if pipeline is None else _pipeline_head(config, pipeline, used_as, facts)),
        "## Data",
        "",
        f"`{Path(config.data.train).name}`: {rows['train']:,} rows to learn from, "
        f"{rows['validation']:,} others to measure on.",
        "",
        f"## Scores on the {rows['validation']:,} rows that were not learnt from",
        "",
        "| metric | value |",
        "|---|---|",
        *(f"| {name} | {value:.4f} |" for name, value in metrics.items() if isinstance(value, float)),
        "",
        *_table(class_scores(metrics)),
        "## Training",
        "",
        f"{show_count(training.epochs, 'epoch')}, {training.batch_size} samples per update, "
        f"{training.optimizer}, learning rate {training.learning_rate:g} ({training.schedule}), "
        f"warm-up over {training.warmup_fraction:.0%} of the updates, "
        f"weight decay {training.weight_decay:g}, seed {training.seed}.",
        "",
    ]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def class_scores(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The scores of each label among the metrics; none where a task means something else by that name.

    Args:
        metrics: What a task measured.
    """
    rows = metrics.get("per_class")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return []
    numbers = ("precision", "recall", "f1", "rows")
    whole = all("label" in row and all(isinstance(row.get(name), Real) for name in numbers) for row in rows)
    return rows if whole else []


def show_score(row: Mapping[str, Any], name: str) -> str:
    """A score of a label: '0.912'; a dash where no row measured it."""
    return f"{row[name]:.3f}" if row["rows"] else "–"


def _pipeline_head(config: RunConfig, pipeline: str, used_as: Path, facts: dict[str, Any]) -> list[str]:
    from huggingface_hub import ModelCardData

    head = ModelCardData(
        library_name="transformers",
        pipeline_tag=pipeline,
        base_model=None if Path(config.model.name).exists() else config.model.name,
        tags=["snugtune", pipeline],
    )
    return [
        "---",
        head.to_yaml().strip(),
        "---",
        "",
        f"# {config.folder.name}",
        "",
        f"Made from `{Path(config.model.name).name}` with snugtune.",
        "",
        "## Use",
        "",
        "```python",
        "from transformers import pipeline",
        "",
        f'model = pipeline("{pipeline}", "{used_as.as_posix()}", truncation=True)',
        'print(model("Write a text here."))',
        "```",
        "",
        f"Labels: {', '.join(facts['label_names']) or 'a number'}. "
        f"Texts longer than {facts['max_length']} tokens are cut off (`truncation=True`).",
        "",
    ]


def _own_head(config: RunConfig) -> list[str]:
    return [
        f"# {config.folder.name}",
        "",
        f"The task `{config.model.name}`, trained with snugtune. Its weights go into the module it made:",
        "",
        "```python",
        "from safetensors.torch import load_model",
        "",
        'load_model(module, "model.safetensors")',
        "```",
        "",
    ]


def _table(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    return [
        "| label | precision | recall | F1 | rows |",
        "|---|---|---|---|---|",
        *(
            f"| {row['label']} | {show_score(row, 'precision')} | {show_score(row, 'recall')} "
            f"| {show_score(row, 'f1')} | {row['rows']} |"
            for row in rows
        ),
        "",
    ]
