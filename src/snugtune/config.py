"""Everything a run file may say, with defaults, checks and help texts.

The text under a setting is its help text: it appears in `--print-config` and in error messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from snugtune.errors import UsageError
from snugtune.units import parse_size


def _checked_size(value: object) -> object:
    if value is not None:
        try:
            parse_size(str(value))
        except UsageError as error:
            raise ValueError(f"{error.what}: {error.why}") from None
    return value


Size = Annotated[str, BeforeValidator(_checked_size)]


class _Settings(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,
        protected_namespaces=(),
    )


class ModelSettings(_Settings):
    """Which model to start from."""

    name: str
    """A local folder in Hugging Face format, or a hub id such as bert-base-uncased."""
    revision: str | None = None
    """Branch, tag or commit of the hub id; null takes the newest."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""
    allow_pickle: bool = False
    """Accept weights in PyTorch's .bin format (read with weights_only=True) where no safetensors exist."""


class DataSettings(_Settings):
    """Which examples to learn from."""

    train: str
    """File (.csv, .tsv, .jsonl, .json, .parquet), folder saved by `datasets`, or hub id of a data set."""
    validation: str | None = None
    """The same for examples that only measure; null sets a part of the training data aside."""
    validation_fraction: float = Field(0.1, gt=0, lt=1)
    """Share of the training data set aside when no validation data is given."""
    train_split: str | None = None
    """Name of the split in a data set that has several; null takes "train"."""
    validation_split: str | None = None
    """Split to measure on, of `validation` or else of `train`."""
    revision: str | None = None
    """Branch, tag or commit of a data set on the hub."""
    text_column: str | None = None
    """Column with the text; null looks for the usual names."""
    text_pair_column: str | None = None
    """Column with the second text, for tasks on pairs of texts."""
    label_column: str | list[str] | None = None
    """Column with the label, or several 0/1 columns (multi-label); null looks for the usual names."""
    label_kind: Literal["auto", "single-label", "multi-label", "regression"] = "auto"
    """What the labels are; auto decides from the data and says what it took."""
    label_separator: Annotated[str, Field(min_length=1)] | None = None
    """Character between several labels in one cell, such as "|"; makes the task multi-label."""
    bad_rows: Literal["stop", "skip"] = "stop"
    """Rows that cannot be read, or have no text or label: stop, or leave them out and say which."""
    encoding: str | None = None
    """Encoding of text files, such as gb18030; null finds out and says what it took."""
    header: Literal["auto"] | bool = "auto"
    """Whether the first line of CSV and TSV names the columns; false calls them column 1, column 2, ..."""
    max_length: int = Field(128, ge=2)
    """Longest text in tokens; what is beyond is cut off."""
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Processes that prepare batches; auto takes some for a model of one's own on a card, else none."""


class TrainingSettings(_Settings):
    """How to learn. Everything is counted in updates (optimizer steps), not in passes."""

    epochs: int = Field(3, ge=1)
    """How often each example is seen."""
    batch_size: int = Field(32, ge=1)
    """Samples behind one update, whatever number of passes it is computed in."""
    batching: Literal["random", "grouped"] = "random"
    """Who shares an update: anybody, or texts of like length. The latter pads less, but is less random."""
    passes: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Forward and backward passes per update. auto cuts by length, so that little is padded; more passes
    need less memory. The result is the same."""
    pass_price: Annotated[int, Field(ge=0)] | None = None
    """What one more pass costs, in tokens that could be computed in its time; null estimates it."""
    pass_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most positions of a pass that auto cuts, padding included: fewer need less memory; null: no limit."""
    packing: Literal["auto"] | bool = "auto"
    """Leave the padding out of all layers but attention, in models where that is possible (BERT, RoBERTa,
    DistilBERT, ELECTRA and their like)."""
    learning_rate: float = Field(5e-5, gt=0)
    """Highest learning rate, reached after warm-up."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate falls after warm-up."""
    warmup_fraction: float = Field(0.06, ge=0, lt=1)
    """Share of all updates in which the learning rate rises."""
    optimizer: Literal["adamw", "adamw-fused", "adamw-foreach", "sgd", "adafactor"] = "adamw"
    """adamw means the variant with the smallest peak (fused); sgd needs a much larger learning rate."""
    weight_decay: float = Field(0.01, ge=0)
    """Weight decay of matrices; norms and biases have none."""
    clip_grad_norm: float | None = Field(1.0, gt=0)
    """Largest gradient norm; null leaves gradients alone."""
    precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """fp16 and bf16 keep the weights in fp32 and compute in half precision where that is safe."""
    checkpointed_layers: Annotated[int, Field(ge=0)] | Literal["all"] = 0
    """Layers (the first n, or all) computed a second time in the backward pass: less memory, more time."""
    unused_parameters: Literal["auto", "stop", "allow"] = "auto"
    """Where no gradient reaches a parameter in the first updates: stop, or only name it. auto stops for a
    model of one's own."""
    class_weights: Literal["balanced"] | dict[str, Annotated[float, Field(ge=0)]] | None = None
    """Weight of each class in the loss: a number per label name, or balanced (rare classes count more)."""
    budget: Size | None = None
    """Cap on the memory PyTorch may take on the card, such as "11 GiB" (2^30) or "11GB" (10^9)."""
    seed: int = Field(42, ge=0)
    """Start of all random numbers: new weights, order of the data, dropout, split."""
    report_to: Literal["tensorboard", "wandb", "mlflow"] | None = None
    """Show the numbers of the run in tensorboard, wandb or mlflow as well; null in none of them."""


class EvaluationSettings(_Settings):
    """When and how to measure."""

    every_updates: int | None = Field(None, ge=1)
    """Updates between two evaluations; null evaluates at the end of each epoch."""
    metric: str | None = None
    """Metric that names the best model: accuracy, macro_f1, loss (one label), micro_f1, macro_f1, loss
    (several labels), mse, pearson, spearman (numbers); null takes the first of its kind."""
    early_stopping: int | None = Field(None, ge=1)
    """Stop after this many evaluations without a better metric; null never stops early."""


class CheckpointSettings(_Settings):
    """What an interrupted run continues from."""

    every_minutes: float | None = Field(10.0, gt=0)
    """Minutes between checkpoints, besides those at evaluations; null saves only at evaluations."""
    keep_last: int = Field(2, ge=1)
    """Checkpoints kept, besides the best."""


class RunConfig(_Settings):
    """A run: what to train, on what, and how."""

    task: Literal["sequence-classification", "own"] = "sequence-classification"
    """What the model learns to do; own means a model that a Python program gives (snugtune.Task)."""
    output: str | None = None
    """Folder of the run; null takes runs/NAME after the data file."""
    model: ModelSettings
    data: DataSettings
    training: TrainingSettings = TrainingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoints: CheckpointSettings = CheckpointSettings()

    @property
    def folder(self) -> Path:
        """Where the run lives."""
        if self.output is not None:
            return Path(self.output)
        name = self.data.train.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
        return Path("runs") / (name.split(".")[0] or "run")

    @property
    def budget_bytes(self) -> int | None:
        """The cap on the allocator in bytes."""
        return None if self.training.budget is None else parse_size(self.training.budget)


# The everyday names of the shell (`--learning-rate`) and of Python (`learning_rate=`).
EVERYDAY: Mapping[str, str] = {
    "task": "task",
    "model": "model.name",
    "data": "data.train",
    "validation": "data.validation",
    "text_column": "data.text_column",
    "text_pair_column": "data.text_pair_column",
    "label_column": "data.label_column",
    "max_length": "data.max_length",
    "epochs": "training.epochs",
    "batch_size": "training.batch_size",
    "learning_rate": "training.learning_rate",
    "passes": "training.passes",
    "precision": "training.precision",
    "checkpointed_layers": "training.checkpointed_layers",
    "budget": "training.budget",
    "seed": "training.seed",
    "output": "output",
}


# These say how a run is computed, not what it learns: they may change when it continues.
_HOW = frozenset(
    {
        "output",
        "data.workers",
        "training.passes",
        "training.pass_price",
        "training.pass_tokens",
        "training.packing",
        "training.precision",
        "training.checkpointed_layers",
        "training.unused_parameters",
        "training.budget",
        "training.report_to",
        "checkpoints.every_minutes",
        "checkpoints.keep_last",
    }
)


def known_names(settings: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """The dotted names of all settings, in the order of the run file."""
    names = []
    for name, field in settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            names += known_names(field.annotation, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


def show_config(config: BaseModel, indent: str = "") -> str:
    """The complete configuration as YAML, each setting under its help text."""
    parts = []
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            parts.append(f"\n{indent}# {(type(value).__doc__ or '').strip()}\n{indent}{name}:\n")
            parts.append(show_config(value, indent + "  "))
        else:
            words = "" if (allowed := _words(field.annotation)) is None else f" ({', '.join(allowed)})"
            text = " ".join((field.description or "").split())
            parts.append(f"{indent}# {text}{words}\n{indent}{name}: {_flow(value)}\n")
    return "".join(parts).lstrip("\n")


def _words(annotation: Any) -> tuple[str, ...] | None:
    """The words that a setting allows, if it allows nothing else."""
    return get_args(annotation) if get_origin(annotation) is Literal else None


def _flow(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


def differences(one: RunConfig, other: RunConfig) -> list[str]:
    """Dotted names of the settings by which two runs learn something different."""
    flat_one, flat_other = dict(flatten(one.model_dump())), dict(flatten(other.model_dump()))
    return [name for name in known_names() if name not in _HOW and flat_one.get(name) != flat_other.get(name)]


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted name and the value of each setting.

    Args:
        values: A dumped configuration.
        prefix: What its names begin with.
    """
    for name, value in values.items():
        if isinstance(value, dict) and prefix + name not in known_names():
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
