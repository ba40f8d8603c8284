"""The commands. Each is one small function that calls the function of the same name in `api`."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from snugtune import __version__, api
from snugtune.errors import SnugtuneError, UsageError

app = typer.Typer(
    name="snugtune",
    help="Fine-tune neural networks on the card you really have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"snugtune {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Fine-tune neural networks on the card you really have."""


@app.command()
def train(
    context: typer.Context,
    run_file: Annotated[
        Path | None, typer.Argument(help="YAML file with settings.", show_default=False)
    ] = None,
    task: Annotated[str | None, typer.Option(help="What the model learns to do.")] = None,
    model: Annotated[str | None, typer.Option(help="Folder of a model, or its hub id.")] = None,
    data: Annotated[
        str | None, typer.Option(help="CSV, TSV, JSONL, JSON, Parquet, folder, or hub id.")
    ] = None,
    validation: Annotated[str | None, typer.Option(help="The same; it only measures.")] = None,
    text_column: Annotated[str | None, typer.Option(help="Column with the text.")] = None,
    text_pair_column: Annotated[str | None, typer.Option(help="Column with the second text.")] = None,
    label_column: Annotated[
        list[str] | None, typer.Option(help="Column with the label; several: 0/1 columns.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="Longest text in tokens. Default: 128.")] = None,
    epochs: Annotated[int | None, typer.Option(help="How often each example is seen. Default: 3.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples per update. Default: 32.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Highest learning rate. Default: 5e-5.")] = None,
    precision: Annotated[str | None, typer.Option(help="auto, fp32, fp16 or bf16.")] = None,
    passes: Annotated[
        str | None, typer.Option(help="Passes per update, or auto: more need less memory. Default: auto.")
    ] = None,
    checkpointed_layers: Annotated[
        str | None, typer.Option(help="Layers computed twice to save memory: 0, a number, or all.")
    ] = None,
    budget: Annotated[str | None, typer.Option(help="Most memory on the card: '11 GiB', '11GB'.")] = None,
    output: Annotated[str | None, typer.Option(help="Folder of the run. Default: runs/NAME.")] = None,
    seed: Annotated[int | None, typer.Option(help="Start of all random numbers. Default: 42.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any setting: training.weight_decay=0.1; may be repeated."),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the complete run file with help texts, and stop.")
    ] = False,
    continue_anyway: Annotated[
        bool,
        typer.Option("--continue-anyway", help="Continue, or train further, with changed settings or data."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print every update.")] = False,
) -> None:
    """Fine-tune a model; the same command continues an interrupted run."""
    from snugtune.runfile import parse_settings

    # The parameters of everyday settings have the names that `api` knows.
    everyday = {name: value for name, value in context.params.items() if name in api.Everyday.__annotations__}
    everyday["label_column"] = (
        label_column[0] if label_column and len(label_column) == 1 else label_column or None
    )
    settings = parse_settings(set_ or [])
    if print_config:
        typer.echo(api.show_config(run_file, set=settings, **everyday), nl=False)
        return
    result = api.train(
        run_file, set=settings, continue_anyway=continue_anyway, quiet=quiet, verbose=verbose, **everyday
    )
    if result.status == "interrupted":
        _leave_interrupted(quiet)


def _leave_interrupted(quiet: bool) -> NoReturn:
    """Print the command that continues, which is the one that was given, and leave."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # everything is saved: one more Ctrl-C changes nothing
    if not quiet and os.environ.get("RANK", "0") == "0":
        program = ["python", "-m", "snugtune"] if Path(sys.argv[0]).stem == "__main__" else ["snugtune"]
        if "LOCAL_WORLD_SIZE" in os.environ:
            launcher = ["python", "-m", "torch.distributed.run", "--nproc-per-node"]
            program = [*launcher, os.environ["LOCAL_WORLD_SIZE"], "-m", "snugtune"]
        words = [*program, *sys.argv[1:]]
        typer.echo(f"continue  {subprocess.list2cmdline(words) if os.name == 'nt' else shlex.join(words)}")
    raise typer.Exit(130)


_Run = Annotated[Path, typer.Argument(help="Folder of a finished run, such as runs/reviews.")]
_TextColumn = Annotated[str | None, typer.Option(help="Column with the text. Default: that of the training.")]
_PairColumn = Annotated[str | None, typer.Option(help="Column with the second text. Default: the same.")]
_Split = Annotated[str | None, typer.Option(help="Part of a data set that has several. Default: train.")]
_BadRows = Annotated[str | None, typer.Option(help="stop, or skip to leave them out. Default: stop.")]
_Encoding = Annotated[str | None, typer.Option(help="Encoding of the file. Default: found out.")]
_Header = Annotated[
    bool | None, typer.Option("--header/--no-header", help="Whether the first line names the columns.")
]
_Precision = Annotated[str, typer.Option(help="auto, fp32, fp16 or bf16.")]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no messages but errors.")]


@app.command()
def evaluate(
    run: _Run,
    data: Annotated[
        str, typer.Option(help="CSV, TSV, JSONL, JSON, Parquet, folder, or hub id, with labels.")
    ],
    text_column: _TextColumn = None,
    text_pair_column: _PairColumn = None,
    label_column: Annotated[
        list[str] | None, typer.Option(help="Column with the label; several: 0/1 columns.")
    ] = None,
    split: _Split = None,
    bad_rows: _BadRows = None,
    encoding: _Encoding = None,
    header: _Header = None,
    precision: _Precision = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: _Quiet = False,
) -> None:
    """Measure a finished model on data that it has not seen."""
    api.evaluate(
        run,
        data,
        text_column=text_column,
        text_pair_column=text_pair_column,
        label_column=label_column or None,
        split=split,
        bad_rows=bad_rows,
        encoding=encoding,
        header=header,
        precision=precision,
        json=json,
        quiet=quiet,
    )


@app.command()
def predict(
    run: _Run,
    data: Annotated[
        str | None, typer.Option(help="CSV, TSV, JSONL, JSON, Parquet, folder, or hub id.")
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="A text, in the place of data; may be repeated.")
    ] = None,
    text_pair: Annotated[
        list[str] | None, typer.Option(help="The second text of each, for a model of pairs.")
    ] = None,
    output: Annotated[
        str | None, typer.Option(help="File for the answers: .csv, .tsv, .jsonl, .parquet. Default: printed.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output that is there.")] = False,
    text_column: _TextColumn = None,
    text_pair_column: _PairColumn = None,
    split: _Split = None,
    bad_rows: _BadRows = None,
    encoding: _Encoding = None,
    header: _Header = None,
    precision: _Precision = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
    quiet: _Quiet = False,
) -> None:
    """Let a finished model answer rows of a table, or texts."""
    done = api.predict(
        run,
        data=data,
        texts=text,
        text_pairs=text_pair,
        output=output or ("-" if data or json else None),
        overwrite=overwrite,
        text_column=text_column,
        text_pair_column=text_pair_column,
        split=split,
        bad_rows=bad_rows,
        encoding=encoding,
        header=header,
        precision=precision,
        json=json,
        quiet=quiet,
    )
    for line in done.lines(text or []):
        typer.echo(line)


@app.command("check-data")
def check_data(
    data: Annotated[str, typer.Argument(help="CSV, TSV, JSONL, JSON, Parquet, folder, or hub id.")],
    validation: Annotated[str | None, typer.Option(help="The same; it only measures.")] = None,
    text_column: Annotated[str | None, typer.Option(help="Column with the text.")] = None,
    text_pair_column: Annotated[str | None, typer.Option(help="Column with the second text.")] = None,
    label_column: Annotated[
        list[str] | None, typer.Option(help="Column with the label; several: 0/1 columns.")
    ] = None,
    bad_rows: _BadRows = None,
    encoding: _Encoding = None,
    header: _Header = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting of data: data.label_kind=regression.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check the data of a run, and nothing else; exit code 1 if a run would stop."""
    from snugtune.runfile import parse_settings

    own = {"data.bad_rows": bad_rows, "data.encoding": encoding, "data.header": header}
    check = api.check_data(
        data,
        validation=validation,
        text_column=text_column,
        text_pair_column=text_pair_column,
        label_column=label_column[0] if label_column and len(label_column) == 1 else label_column or None,
        set={
            **{name: value for name, value in own.items() if value is not None},
            **parse_settings(set_ or []),
        },
        json=json,
        quiet=False,
    )
    if check.stops:
        raise typer.Exit(1)


@app.command()
def demo(
    output: Annotated[str, typer.Option(help="Folder of the run.")] = "runs/demo",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Teach a real model to sort real news articles, in about two minutes."""
    if api.demo(output, quiet=quiet).status == "interrupted":
        _leave_interrupted(quiet)


@app.command()
def doctor(
    card: Annotated[
        list[str] | None, typer.Option(help="A card of a machine that is not this one: 'GTX 1080 Ti'.")
    ] = None,
    driver: Annotated[str | None, typer.Option(help="Its driver: 550.54.14.")] = None,
    python: Annotated[str | None, typer.Option(help="Its Python: 3.12.")] = None,
    os_: Annotated[str | None, typer.Option("--os", help="linux, windows or wsl. Default: linux.")] = None,
    torch: Annotated[str | None, typer.Option(help="Its PyTorch: 2.15.0+cu132.")] = None,
    input_: Annotated[
        list[str] | None,
        typer.Option("--input", help="File with recorded text: nvidia-smi, pip list, dmesg, an error."),
    ] = None,
    install_line: Annotated[
        str | None,
        typer.Option(help="Only print the command that installs torch, tensorflow or bitsandbytes."),
    ] = None,
    fallback: Annotated[
        bool, typer.Option("--fallback", help="The command to take when that one fails.")
    ] = False,
    mirror: Annotated[str | None, typer.Option(help="A mirror of PyTorch's index.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the self-test on the card.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what is here and what to install for it; exit code 1 if training would fail."""
    described: dict[str, Any] = {
        "cards": card or (),
        "driver": driver,
        "python": python,
        "system": os_,
        "torch": torch,
        "inputs": input_ or (),
    }
    if fallback and (install_line is None or any(described.values())):
        raise UsageError(
            "--fallback has nothing to do here",
            why="it is the second line of --install-line, for this machine",
            do="leave it out, or give --install-line alone",
        )
    if install_line is None:
        report = api.doctor(**described, quick=quick, mirror=mirror, json=json, quiet=False)
        raise typer.Exit(0 if report.ok else 1)
    if any(described.values()):
        line: str | None = api.doctor(**described, mirror=mirror).line_for(install_line)
    else:
        line = api.install_line(install_line, fallback=fallback, mirror=mirror)
    if line is not None:
        typer.echo(line)


@app.command()
def cards(json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show the known cards: capability, memory, bandwidth, last builds, sources."""
    api.cards(json=json)


def main() -> None:
    """Run the command line; errors of ours become a message and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except SnugtuneError as error:
        # All processes of a run get the same command line; one message about it is enough.
        if not isinstance(error, UsageError) or os.environ.get("RANK", "0") == "0":
            typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.exit(130)
