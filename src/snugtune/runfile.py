"""Run files, arguments and settings become one checked configuration."""

from __future__ import annotations

import codecs
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from snugtune.config import EVERYDAY, RunConfig, known_names
from snugtune.errors import UsageError


class _Loader(yaml.SafeLoader):
    """YAML in which only true and false are booleans, as in YAML 1.2: labels are often yes and no."""


_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if letter in "tTfF" or not tag.endswith(":bool")]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load_config(
    run_file: str | Path | None = None,
    *,
    everyday: Mapping[str, object] | None = None,
    settings: Mapping[str, object] | None = None,
    examples: Mapping[str, object] | None = None,
) -> RunConfig:
    """Resolve a configuration. What comes later wins: file, everyday names, settings.

    Args:
        run_file: YAML file.
        everyday: Values by everyday name (`learning_rate`); those that are None are not set.
        settings: Values by dotted name (`training.learning_rate`).
        examples: Values by dotted name for what is given nowhere else and has no default.

    Raises:
        UsageError: A file that cannot be read, an unknown name, a value that is not allowed.
    """
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    if run_file is not None:
        values, lines = _read_yaml(Path(run_file))
    for name, value in (everyday or {}).items():
        if name not in EVERYDAY:
            raise _unknown(name, f"the argument {name!r}", [*EVERYDAY])
        if value is not None:
            _put(values, EVERYDAY[name], _plain(value))
    for name, value in (settings or {}).items():
        if name not in known_names():
            raise _unknown(name, f"the setting {name!r}", known_names())
        _put(values, name, _plain(value))
    for name, value in (examples or {}).items():
        group, _, leaf = name.partition(".")
        if isinstance(inner := values.setdefault(group, {}), dict):
            inner.setdefault(leaf, value)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise _explain(error, lines=lines, run_file=run_file) from None


def parse_settings(texts: Sequence[str]) -> dict[str, object]:
    """['training.learning_rate=3e-5'] -> {'training.learning_rate': '3e-5'}; values are read as YAML.

    Raises:
        UsageError: No '=' in a text, or a value that is not YAML.
    """
    settings: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        settings[name.strip()] = _value(value)
        if not equals:
            raise UsageError(
                f"cannot read --set {text!r}",
                why="it needs the form NAME=VALUE, where VALUE is written as in the run file",
                do="write for example --set training.learning_rate=3e-5",
            )
    return settings


def _value(text: str) -> object:
    """A value as in a run file; a sign such as | or , that YAML reads as syntax means itself."""
    if re.fullmatch(r"[^\w~\s]", text.strip()):
        return text.strip()
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return text


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def _put(values: dict[str, Any], dotted: str, value: object) -> None:
    *groups, name = dotted.split(".")
    for group in groups:
        if not isinstance(values.get(group), dict):
            values[group] = {}
        values = values[group]
    values[name] = value


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The values of a run file, and the line of each dotted name."""
    try:
        content = path.read_bytes()
        # PowerShell 5 writes what is sent into a file as UTF-16.
        utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = content.decode("utf-16" if utf16 else "utf-8-sig")
        node = yaml.compose(text, Loader=_Loader)
        values = yaml.load(text, Loader=_Loader)
    except OSError as error:
        raise UsageError(
            f"cannot read the run file {path}",
            why=str(error.strerror or error),
            do="check the name; `--print-config` writes a new one",
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the run file {path} is not YAML in UTF-8", why=" ".join(str(error).split()), do="mend that line"
        ) from None
    if not isinstance(values, dict):
        raise UsageError(
            f"the run file {path} has no settings",
            why="it must be a mapping, such as `model: {name: ...}`",
            do="see `snugtune train --print-config`",
        )
    return values, dict(_lines(node, path))


def _lines(node: yaml.Node | None, path: Path, prefix: str = "") -> Iterator[tuple[str, int]]:
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        name, line = prefix + str(key.value), key.start_mark.line + 1
        if name in seen:
            raise UsageError(
                f"{path}, line {line}: {name} is set twice",
                why=f"it already has a value in line {seen[name]}, and only one of them can count",
                do="remove one of the two lines",
            )
        seen[name] = line
        yield name, line
        yield from _lines(value, path, name + ".")


def _unknown(name: str, what: str, known: Sequence[str]) -> UsageError:
    leaf = name.rsplit(".", 1)[-1]
    same_leaf = [full for full in known if full.rsplit(".", 1)[-1] == leaf]
    near = same_leaf or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    near = near or [
        full for full in known if difflib.get_close_matches(leaf, [full.rsplit(".", 1)[-1]], cutoff=0.7)
    ]
    inside = [full for full in known if full.startswith(f"{name}.")]
    if inside:
        return UsageError(
            f"{what} is a group", why="only the settings in it have values", do=f"such as {inside[0]}"
        )
    return UsageError(
        f"{what} does not exist",
        why="nothing in snugtune reads it",
        do=f"did you mean {near[0]}?" if near else "see the names in `snugtune train --print-config`",
    )


def _explain(error: ValidationError, *, lines: Mapping[str, int], run_file: str | Path | None) -> UsageError:
    """The first thing that pydantic found, in our own form."""
    # An unknown name comes first: it is often the misspelling of one that is then missing.
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    known = known_names()
    parts: list[str] = []
    for part in first["loc"]:
        # Below a setting, pydantic's location goes on with the members of a union: not ours to show.
        if ".".join(parts) not in known:
            parts.append(str(part))
    name = ".".join(parts)
    line = lines.get(name)
    where = f"{run_file}, line {line}: " if line is not None else ""
    if first["type"] == "extra_forbidden":
        return _unknown(name, f"{where}the setting {name!r}", known)
    if first["type"] == "missing":
        return _missing(name)
    # A union reports each member that did not match; together they say what is allowed.
    same = [e["msg"] for e in error.errors() if e["loc"][: len(parts)] == tuple(first["loc"][: len(parts)])]
    return UsageError(
        f"{where}{name} cannot be {first['input']!r}",
        why="; or ".join(dict.fromkeys(text.removeprefix("Value error, ") for text in same)),
        do=_help(name),
    )


def _missing(name: str) -> UsageError:
    name = {"model": "model.name", "data": "data.train"}.get(name, name)
    flag = next((flag for flag, full in EVERYDAY.items() if full == name), None)
    return UsageError(
        f"{name} is not given",
        why="there is no useful default for it",
        do=f"add --{flag.replace('_', '-')} ..., or {name} in the run file: {_help(name)}"
        if flag
        else _help(name),
    )


def _help(name: str) -> str:
    settings: type[BaseModel] = RunConfig
    *groups, last = name.split(".")
    for group in groups:
        field = settings.model_fields.get(group)
        if field is None or not (
            isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        ):
            return "see `snugtune train --print-config`"
        settings = field.annotation
    field = settings.model_fields.get(last)
    return (field.description if field else None) or "see `snugtune train --print-config`"
