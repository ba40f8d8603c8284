"""What the commands do, as functions of the same names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from snugtune.config import RunConfig
    from snugtune.tasks import Prepared, Task
    from snugtune.training.progress import Mode
    from snugtune.training.result import TrainResult


class Everyday(TypedDict, total=False):
    """The settings that people change often; the same names as the flags of the shell."""

    task: str | Task | None
    model: str | Path | None
    data: Any
    validation: Any
    text_column: str | None
    text_pair_column: str | None
    label_column: str | Sequence[str] | None
    max_length: int | None
    epochs: int | None
    batch_size: int | None
    learning_rate: float | None
    passes: int | str | None
    precision: str | None
    checkpointed_layers: int | str | None
    budget: str | None
    seed: int | None
    output: str | Path | None


def train(
    run_file: str | Path | None = None,
    *,
    set: Mapping[str, object] | None = None,
    quiet: bool = False,
    verbose: bool = False,
    **everyday: Unpack[Everyday],
) -> TrainResult:
    """Fine-tune a model, continue an unfinished run, or return the results of a finished one.

    What comes later wins: run file, everyday settings, `set`.

    For a model of your own, `task` is a `snugtune.Task`, and `data` (and `validation`) are dictionaries of
    arrays of equal length or data sets whose rows are dictionaries.

    Args:
        run_file: YAML file with settings.
        set: Any settings by dotted name, such as {"training.weight_decay": 0.1}.
        quiet: Print nothing.
        verbose: Print every update.
        everyday: model, data, learning_rate and the others of `Everyday`.

    Raises:
        SnugtuneError: What is wrong, why, and what to do.
    """
    from snugtune.runfile import load_config
    from snugtune.training.console import console
    from snugtune.training.folder import open_folder
    from snugtune.training.result import finished_result
    from snugtune.training.summary import print_result

    # Of several processes only the first speaks; torch.distributed.run numbers them.
    quiet = quiet or os.environ.get("RANK", "0") != "0"
    digests, prepare = None, None
    if not isinstance(everyday.get("task"), str | None):
        everyday, digests, prepare = _own(**everyday)  # type: ignore[arg-type]
    config = load_config(run_file, everyday=everyday, settings=set)
    folder = open_folder(config, digests)
    if folder.state == "finished":
        result = finished_result(folder)
    else:
        _need_training()
        from snugtune.training.loop import run_training

        mode: Mode = "quiet" if quiet else "verbose" if verbose else "normal"
        result = run_training(config, folder, mode=mode, **({} if prepare is None else {"prepare": prepare}))
    if not quiet and result.status == "finished":
        print_result(result, console())
    return result


def _own(
    *, task: Task, data: Any = None, validation: Any = None, **everyday: Any
) -> tuple[Everyday, dict[str, str], Callable[[RunConfig], Prepared]]:
    """Everyday settings, digests of the data, and what prepares a model of somebody's own."""
    _need_training()
    from snugtune.tasks import own

    own.check_task(task, data)
    digests = {"data.train": own.digest_of(data), "data.validation": own.digest_of(validation)}
    # A run file can only name things, so it gets the task's name in place of them.
    named: Everyday = {**everyday, "task": "own", "model": task.name, "data": task.name}  # type: ignore[typeddict-item]
    return (
        named,
        {name: digest for name, digest in digests.items() if digest is not None},
        partial(own.prepare, task=task, data=data, validation=validation),
    )


def show_config(
    run_file: str | Path | None = None,
    *,
    set: Mapping[str, object] | None = None,
    **everyday: Unpack[Everyday],
) -> str:
    """The complete configuration that `train` would use, as a run file with help texts.

    Raises:
        UsageError: An unknown name, or a value that is not allowed.
    """
    from snugtune import config
    from snugtune.runfile import load_config

    examples = {"model.name": "bert-base-uncased", "data.train": "reviews.csv"}
    return config.show_config(load_config(run_file, everyday=everyday, settings=set, examples=examples))


def demo(output: str | Path = "runs/demo", *, quiet: bool = False) -> TrainResult:
    """Fine-tune a real pretrained model on real news articles, and ask it three questions.

    Args:
        output: Folder of the run; the articles are written beside it.
        quiet: Print nothing.

    Raises:
        MissingDependency: The packages of the demo are not installed.
    """
    from snugtune.data.demo import QUESTIONS, demo_model, write_articles
    from snugtune.training.console import console

    out = console()
    out.quiet = quiet
    folder = Path(output)
    model = demo_model()
    articles = write_articles(folder.with_name(f"{folder.name}-data") / "articles.csv")
    out.print(_INTRODUCTION.format(rows=articles.rows, copies=articles.copies, path=articles.path))
    result = train(
        model=model,
        data=articles.path,
        epochs=1,
        learning_rate=2e-4,  # a small model, seen once: the default of 5e-5 would need three epochs
        output=folder,
        quiet=quiet,
        set={"data.validation_fraction": 0.25},
    )
    if result.model_folder is not None and not quiet:
        out.print(_EXPLANATION.format(accuracy=result.metrics["accuracy"], model=result.model_folder))
        for text, label in zip(QUESTIONS, _ask(result.model_folder, QUESTIONS), strict=True):
            out.print(f"  {label:<14} {text}")
        out.print(_FAREWELL.format(model=result.model_folder, data=articles.path))
    return result


def install_line(package: str, *, fallback: bool = False) -> str | None:
    """The command that installs a package so that it works on this machine's cards.

    Args:
        package: Its name, such as "torch".
        fallback: The line to take when the first one does not work; None if there is no other.

    Raises:
        UsageError: No line is known for it.
    """
    from snugtune import environment, hardware

    line = environment.install_line(package, hardware.find_gpus())
    if not fallback:
        return str(line)
    return None if line.fallback is None else environment.shell_line(line.fallback)


def _need_training() -> None:
    """Say what to install before anything heavy is imported."""
    from snugtune.errors import need
    from snugtune.hub import quiet_hub

    quiet_hub()
    for module in ("torch", "transformers", "datasets", "accelerate", "torchmetrics"):
        need(module, extra="train", because="training")


def _ask(model: Path, texts: Sequence[str]) -> list[str]:
    from transformers import pipeline

    from snugtune.tasks.pretrained import quiet_transformers

    with quiet_transformers():
        classify = pipeline("text-classification", str(model))
        return [answer["label"] for answer in classify(list(texts))]


_INTRODUCTION = """\
This demo teaches a small language model to sort news articles.

- The model, MiniLM, has read a lot of English, but does not know what a news section is.
- It sees {rows:,} articles of five sections (business, entertainment, politics, sports, tech); {copies} exact
  copies were left out. They lie in {path}; have a look.
- One article in four is kept back. The model never learns from these; they show what it can do.
"""

_EXPLANATION = """
What this means: of the articles that it had never seen, the model puts {accuracy:.0%} into the right section.
"loss" above is how wrong it was while it learnt; it should fall. Now three sentences from elsewhere:
"""

_FAREWELL = """
The model lies in {model}. Use it from Python:

  from transformers import pipeline
  print(pipeline("text-classification", "{model}", truncation=True)("Write a text here."))

Train your own, from a CSV file with a column of texts and a column of labels:

  snugtune train --model {model} --data reviews.csv
"""
