"""The documents say what the program does: commands, settings, links, names and the printed run file."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import snugtune
from snugtune import api
from snugtune.cli import app
from snugtune.config import EVERYDAY, known_names
from snugtune.errors import UsageError
from snugtune.runfile import load_config, parse_settings

ROOT = Path(__file__).parent.parent
README, GUIDE = ROOT / "README.md", ROOT / "docs" / "guide.md"
TRANSLATIONS = {path: path.with_suffix(".zh.md") for path in (README, GUIDE)}
FOR_USERS = [*TRANSLATIONS, *TRANSLATIONS.values()]
ALL = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_GROUPS = "|".join(sorted({name.split(".")[0] for name in known_names() if "." in name}))
_SETTING = re.compile(rf"(?<![\w./-])(?:{_GROUPS})\.[a-z_]+\b(?!\.?[\w/(])")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FILES = {"safetensors", "json", "jsonl", "csv", "yaml", "txt"}


def every_document(paths: list[Path]) -> Any:
    return pytest.mark.parametrize("path", paths, ids=lambda path: str(path.relative_to(ROOT)))


def blocks(text: str, *languages: str) -> list[str]:
    """The fenced blocks of some languages, or all of them, without the fences."""
    return [body for _, language, body in _FENCE.findall(text) if not languages or language in languages]


def prose(text: str) -> str:
    return _FENCE.sub("", text)


# Commands


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of snugtune in the fenced blocks, without what the shell does with output."""
    for block in blocks(text):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if line.strip().startswith("snugtune ") else []
            if words:
                ends = [number for number, word in enumerate(words) if word in (">", ">>", "|", "&&", ";")]
                yield words[1 : ends[0] if ends else None]


def refused(words: list[str]) -> str | None:
    """Why the program would not accept a command; None if it would. Nothing is run."""
    if words in (["--help"], ["--version"]):
        return None
    if words[0] not in COMMANDS:
        return f"there is no command {words[0]!r}"
    try:
        parameters = COMMANDS[words[0]].make_context(words[0], words[1:]).params
    except Exception as error:  # the exceptions of Typer's own copy of Click
        return str(error)
    if words[0] == "train":
        values = {name: value for name, value in parameters.items() if name in EVERYDAY}
        values["label_column"] = list(values["label_column"] or ()) or None
        try:
            settings = parse_settings(parameters["set_"] or [])
            load_config(everyday=values, settings=settings, examples=_given(parameters))
        except UsageError as error:
            return str(error)
    return None


def _given(parameters: dict[str, Any]) -> dict[str, object]:
    """What a run file, or the reader of `--print-config`, gives; without these a command must be complete."""
    elsewhere = parameters["run_file"] or parameters["print_config"]
    return {"model.name": "model", "data.train": "data.csv"} if elsewhere else {}


@every_document(FOR_USERS)
def test_every_command_would_be_accepted(path: Path) -> None:
    found = list(commands(path.read_text("utf-8")))
    assert len(found) > 3
    assert [(" ".join(words), why) for words in found if (why := refused(words))] == []


@pytest.mark.parametrize(
    "line",
    [
        "snugtune tarin --model m --data d.csv",
        "snugtune train --model m --data d.csv --learnig-rate 1e-5",
        "snugtune train --model m --data d.csv --epochs many",
        "snugtune train --model m --data d.csv --epochs 0",
        "snugtune train --model m --data d.csv --precision int8",
        "snugtune train --model m",
        "snugtune train run.yaml --set training.rate=1",
        "snugtune train run.yaml \\\n  --oops",
        "snugtune doctor --os",
    ],
)
def test_a_command_that_would_fail_is_found(line: str) -> None:
    (words,) = commands(f"text\n```sh\n{line}\n```\n")
    assert refused(words)


def test_a_command_ends_where_the_shell_begins() -> None:
    text = "```sh\nmake demo\nsnugtune train a.yaml --print-config > b.yaml  # why\n```\nsnugtune prose\n"
    assert list(commands(text)) == [["train", "a.yaml", "--print-config"]]


@every_document([GUIDE, TRANSLATIONS[GUIDE]])
def test_the_guide_has_every_command_and_flag(path: Path) -> None:
    text = path.read_text("utf-8")
    flags = {flag for command in COMMANDS.values() for parameter in command.params for flag in parameter.opts}
    missing = [flag for flag in flags if flag.startswith("--") and f"`{flag}" not in text]
    assert missing == []
    assert [name for name in COMMANDS if f"`snugtune {name}" not in text] == []


# Settings and run files


def unknown_settings(text: str) -> list[str]:
    """Dotted names of settings that do not exist; names of files are not meant."""
    found = {name for name in _SETTING.findall(text) if name.rsplit(".")[-1] not in _FILES}
    return sorted(found - set(known_names()))


@every_document(ALL)
def test_every_setting_in_the_documents_exists(path: Path) -> None:
    text = path.read_text("utf-8")
    assert unknown_settings(prose(text) + "".join(blocks(text, "sh", "yaml"))) == []


def test_a_setting_that_does_not_exist_is_found() -> None:
    text = "`training.rate`, data.label_kind=x, (model.names), --set evaluation.metrics=f1, model.safetensors"
    assert unknown_settings(text) == ["evaluation.metrics", "model.names", "training.rate"]
    assert unknown_settings("`training/loop.py` snugtune.training.loop my.data.rows end of data. Next") == []


@every_document(FOR_USERS)
def test_every_run_file_in_the_documents_is_accepted(path: Path, tmp_path: Path) -> None:
    found = blocks(path.read_text("utf-8"), "yaml")
    assert found
    for block in found:
        file = tmp_path / "run.yaml"
        file.write_text(block, encoding="utf-8")
        assert load_config(file).data.train == yaml.safe_load(block)["data"]["train"]


@every_document([GUIDE, TRANSLATIONS[GUIDE]])
def test_the_guide_shows_the_configuration_as_it_is_printed(path: Path) -> None:
    """When it fails: put the output of `snugtune train --print-config` into the block."""
    assert api.show_config() in blocks(path.read_text("utf-8"), "yaml")


# Python


def wrong_calls(code: str) -> list[str]:
    """Names of the package, and arguments of `train`, that do not exist."""
    faults = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "snugtune":
            faults += [] if node.attr in snugtune.__all__ else [node.attr]
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "snugtune.train":
            known = {*EVERYDAY, "set", "quiet", "verbose"}
            faults += [str(keyword.arg) for keyword in node.keywords if keyword.arg not in known]
    return faults


@every_document(FOR_USERS)
def test_python_in_the_documents_uses_names_that_exist(path: Path) -> None:
    found = blocks(path.read_text("utf-8"), "python")
    assert found
    assert [fault for code in found for fault in wrong_calls(code)] == []


def test_a_wrong_call_is_found() -> None:
    assert wrong_calls("import snugtune\nsnugtune.train(model='m', lr=1)\nsnugtune.fit()") == ["lr", "fit"]


@every_document([GUIDE, TRANSLATIONS[GUIDE]])
def test_the_guide_has_every_public_name(path: Path) -> None:
    text = path.read_text("utf-8")
    assert [name for name in snugtune.__all__ if f"`snugtune.{name}`" not in text] == []


# Links and translations


def broken_links(text: str, folder: Path) -> list[str]:
    """Relative links that lead to no file."""
    links = [link for link in _LINK.findall(prose(text)) if "://" not in link]
    return [link for link in links if not (folder / link.partition("#")[0]).is_file()]


@every_document(ALL)
def test_every_relative_link_leads_to_a_file(path: Path) -> None:
    assert broken_links(path.read_text("utf-8"), path.parent) == []


def test_a_broken_link_is_found() -> None:
    text = "[a](README.md) [b](docs/no.md) [c](https://x.y/z) [d](no.md#part)\n```\n[e](f)\n```\n"
    assert broken_links(text, ROOT) == ["docs/no.md", "no.md#part"]


def shape(text: str) -> dict[str, Any]:
    """What a translation shares with its original."""
    outside = prose(text)
    return {
        "levels of the headings": [len(marks) for marks in re.findall(r"^(#+) ", outside, re.MULTILINE)],
        "blocks": blocks(text),
        "rows of the tables": len(re.findall(r"^\|", outside, re.MULTILINE)),
        "settings": sorted(set(_SETTING.findall(outside))),
        "links to other sites": sorted(link for link in _LINK.findall(outside) if "://" in link),
    }


@pytest.mark.parametrize("original", TRANSLATIONS, ids=lambda path: path.name)
def test_a_translation_has_the_shape_of_its_original(original: Path) -> None:
    english, chinese = shape(original.read_text("utf-8")), shape(TRANSLATIONS[original].read_text("utf-8"))
    for name, value in english.items():
        assert chinese[name] == value, name


def test_a_translation_that_lacks_something_is_found() -> None:
    text = "# A\n## B\n`training.epochs` [x](https://x.y)\n\n| a |\n|---|\n```sh\nmake\n```\n"
    for part in ("## B\n", "| a |\n", "`training.epochs`", "https://x.y", "make\n"):
        assert shape(text) != shape(text.replace(part, "", 1))
