"""What the commands do, as functions of the same names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from snugtune.errors import UsageError, need

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from snugtune.data.asked import AskedTable
    from snugtune.data.look import DataCheck
    from snugtune.environment.doctor import Described
    from snugtune.environment.showing import Report
    from snugtune.inference.tables import Predictions
    from snugtune.tasks import Metrics, Task
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
    continue_anyway: bool = False,
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
        continue_anyway: Continue a run, or train a finished one further, although settings or data that
            change what it learns are not those of before.
        quiet: Print nothing.
        verbose: Print every update.
        everyday: model, data, learning_rate and the others of `Everyday`.

    Raises:
        SnugtuneError: What is wrong, why, and what to do.
    """
    from snugtune.runfile import load_config
    from snugtune.training.console import console
    from snugtune.training.lock import open_locked
    from snugtune.training.result import finished_result
    from snugtune.training.summary import print_result

    # Of several processes only the first speaks; torch.distributed.run numbers them.
    quiet = quiet or os.environ.get("RANK", "0") != "0"
    digests, prepare = None, None  # of a model of somebody's own
    if not isinstance(everyday.get("task"), str | None):
        _need_training()
        from snugtune.tasks.own import in_names

        everyday, digests, prepare = in_names(**everyday)  # type: ignore[assignment]
    config = load_config(run_file, everyday=everyday, settings=set)
    with open_locked(config, digests, anyway=continue_anyway) as folder:
        if folder.state == "finished":
            result = finished_result(folder)
            if not quiet:
                console().print(f"run       {folder.path} finished before; nothing was trained")
        else:
            _need_training()
            from snugtune.training.loop import run_training

            mode: Mode = "quiet" if quiet else "verbose" if verbose else "normal"
            own = {} if prepare is None else {"prepare": prepare}
            result = run_training(config, folder, mode=mode, **own)
    if not quiet and result.status == "finished":
        print_result(result, console())
    return result


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


def evaluate(
    run: str | Path,
    data: str | Path,
    *,
    label_column: str | Sequence[str] | None = None,
    precision: str = "auto",
    json: bool = False,
    quiet: bool = False,
    **table: Unpack[AskedTable],
) -> Metrics:
    """Measure the model of a finished run on data with labels; the scores are those of the training.

    Args:
        run: The run's folder.
        data: File, folder saved by `datasets`, or hub id of a data set.
        label_column: Column of the label, or the 0/1 columns of several; None takes those of the training.
        precision: auto, fp32, fp16 or bf16.
        json: Print one JSON object in the place of tables.
        quiet: Print nothing else.
        table: text_column, split, bad_rows, encoding and the others of `AskedTable`.

    Raises:
        SnugtuneError: What is wrong, why, and what to do.
    """
    _need_training("evaluating")
    from snugtune.inference.runs import open_run
    from snugtune.inference.sources import open_source
    from snugtune.inference.tables import Predictions, evaluate_source
    from snugtune.training.finished import open_predictor, say_done, say_notes
    from snugtune.training.summary import print_scores

    finished = open_run(Path(run), precision=precision)
    labels = [label_column] if isinstance(label_column, str) else label_column
    source = open_source(finished, data, labels=labels, **table)
    rows = len(source.table)
    with open_predictor(finished, rows=rows, quiet=quiet) as (predictor, on_rows, say):
        say_notes(source.notes, say)
        metrics, cut_off = evaluate_source(predictor, source, on_rows=on_rows)
    say_done(Predictions(cut_off=cut_off), finished, say)
    if json or not quiet:
        print_scores(metrics, finished.labels.names, run=run, data=data, rows=rows, as_json=json)
    return metrics


def predict(  # noqa: PLR0913
    run: str | Path,
    *,
    data: str | Path | None = None,
    texts: Sequence[str] | None = None,
    text_pairs: Sequence[str] | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    precision: str = "auto",
    json: bool = False,
    quiet: bool = False,
    **table: Unpack[AskedTable],
) -> Predictions:
    """Ask the model of a finished run about every row of a table, or about some texts.

    Args:
        run: The run's folder.
        data: File, folder saved by `datasets`, or hub id of a data set.
        texts: Texts, in the place of data.
        text_pairs: The second text of each, for a model of pairs.
        output: File for the rows and their answers: .csv, .tsv, .jsonl or .parquet. "-" prints them as CSV;
            None keeps the answers in memory.
        overwrite: Replace a file that is there.
        precision: auto, fp32, fp16 or bf16.
        json: Print JSON lines in the place of CSV.
        quiet: Print no messages.
        table: text_column, split, bad_rows, encoding and the others of `AskedTable`.

    Raises:
        SnugtuneError: What is wrong, why, and what to do.
    """
    from snugtune.data.asked import check_asked

    check_asked(texts, data, useless=table if data is None else {"text_pairs": text_pairs})
    if json and output not in (None, "-"):
        raise UsageError(
            f"--json and --output {output} do not go together",
            why="--json prints, and the name of a file decides its format",
            do="leave one of them out; JSON lines are written into a file that ends in .jsonl",
        )
    _need_training("predicting")
    from snugtune.data.writers import check_output
    from snugtune.inference.runs import open_run
    from snugtune.inference.sources import open_source, source_of_texts
    from snugtune.inference.tables import STANDARD_OUTPUT, predict_source
    from snugtune.training.console import console
    from snugtune.training.finished import open_predictor, say_done, say_notes

    if output is not None and output != STANDARD_OUTPUT:
        check_output(Path(output), source=data, overwrite=overwrite)
    finished = open_run(Path(run), precision=precision)
    if data is None:
        source = source_of_texts(finished, texts or (), text_pairs)
    else:
        source = open_source(finished, data, labels=(), **table)
    printing = output == STANDARD_OUTPUT and console().is_terminal  # then the rows show how far it is
    rows = 0 if printing or data is None else len(source.table)
    with open_predictor(finished, rows=rows, quiet=quiet) as (predictor, on_rows, say):
        say_notes(source.notes, say)
        done = predict_source(predictor, source, output=output, as_json=json, on_rows=on_rows)
    say_done(done, finished, say)
    return done


def demo(output: str | Path = "runs/demo", *, quiet: bool = False) -> TrainResult:
    """Fine-tune a real pretrained model on real news articles, and ask it three questions.

    Args:
        output: Folder of the run; the articles are written beside it.
        quiet: Print nothing.

    Raises:
        MissingDependency: The packages of the demo are not installed.
    """
    from snugtune.data.demo import EXPLANATION, FAREWELL, INTRODUCTION, QUESTIONS, demo_model, write_articles
    from snugtune.training.console import console

    out = console()
    out.quiet = quiet
    folder, model = Path(output), demo_model()
    articles = write_articles(folder.with_name(f"{folder.name}-data") / "articles.csv")
    out.print(INTRODUCTION.format(rows=articles.rows, copies=articles.copies, path=articles.path))
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
        from snugtune.tasks.pretrained import ask

        out.print(EXPLANATION.format(accuracy=result.metrics["accuracy"], model=result.model_folder))
        for text, label in zip(QUESTIONS, ask(result.model_folder, QUESTIONS), strict=True):
            out.print(f"  {label:<14} {text}")
        out.print(FAREWELL.format(model=result.model_folder, data=articles.path))
    return result


def check_data(
    data: str | Path,
    *,
    validation: str | Path | None = None,
    set: Mapping[str, object] | None = None,
    json: bool = False,
    quiet: bool = True,
    **columns: str | Sequence[str] | None,
) -> DataCheck:
    """Check the data of a run as `train` would, and do nothing else; columns are named as there.

    Args:
        data: File, folder saved by `datasets`, or hub id of a data set.
        validation: The same for examples that only measure.
        set: Settings by dotted name, such as {"data.bad_rows": "skip"}.
        json, quiet: Print one JSON object; print nothing else.

    Raises:
        SnugtuneError: The question cannot be answered. That a run would stop is an answer.
    """
    _need_training("checking data", ("datasets",))
    from snugtune.data.look import look_at
    from snugtune.runfile import load_config

    given: Any = {**columns, "data": data, "validation": validation, "model": "none"}
    check = look_at(load_config(everyday=given, settings=set).data)
    if json or not quiet:
        check.print(as_json=json)
    return check


def doctor(*, json: bool = False, quiet: bool = True, **described: Unpack[Described]) -> Report:
    """Say what is here, whether it works on the cards, and what to install. `described` is another machine.

    Raises:
        UsageError: A description that cannot be read. That training would fail is an answer.
    """
    from snugtune.environment.doctor import examine

    report = examine(**described)
    if json or not quiet:
        report.print(as_json=json)
    return report


def cards(*, json: bool = False) -> None:
    """Print the table of known cards: capability, memory, bandwidth, last builds; as JSON with sources."""
    from snugtune.environment.tables import print_cards

    print_cards(as_json=json)


def install_line(package: str, *, fallback: bool = False, mirror: str | None = None) -> str | None:
    """The command that installs a package for this machine's cards, or the one to take when that fails.

    Raises:
        UsageError: No line is known for it.
    """
    from snugtune import environment, hardware

    line = environment.install_line(package, hardware.find_gpus(), mirror=mirror)
    return line.other if fallback else str(line)


_TRAINING = ("torch", "transformers", "datasets", "accelerate", "torchmetrics")


def _need_training(because: str = "training", modules: Sequence[str] = _TRAINING) -> None:
    """Say what to install before anything heavy is imported."""
    from snugtune.hub import quiet_hub

    quiet_hub()
    for module in modules:
        need(module, extra="train", because=because)
