"""The house keeps itself: rules over every source file, and for each rule a fault that it must find."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import snugtune

SOURCE = Path(snugtune.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# A module imports only from lower rows; the longest matching name decides its row.
ROWS = (
    ("units", "errors", "facts", "hub"),
    ("config", "hardware", "data", "record", "symptoms"),
    (
        "runfile",
        "processes",
        "seeds",
        "memory",
        "techniques",
        "tasks",
        "environment",
        "monitor.sampler",
        "monitor.leaks",
    ),
    ("step",),
    ("planning", "inference"),
    ("triage", "monitor.terminal", "monitor.watch"),
    ("training", "reporting", "bench"),
    ("api", "callbacks", "tensorflow", "demo"),
    ("cli",),
    ("__init__", "__main__"),
)
ROW = {name: row for row, names in enumerate(ROWS) for name in names}
ROW["errors"] = -1  # everything may raise them

SLOW = {"torch", "transformers", "datasets", "accelerate", "torchmetrics", "peft", "bitsandbytes"}
STARTS_FAST = (*ROWS[0], *ROWS[1], "environment", "monitor", "triage", "reporting", "api", "cli", *ROWS[-1])
MAY_LOAD_PYDANTIC = ("config", "runfile")
UNSAFE = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "common", "misc"}
MOST_LINES_OF_A_FILE = 350
MOST_LINES_OF_A_FUNCTION = 60


def every_file(rule: Any) -> Any:
    """Run a test once for each source file, with its module's name and its tree."""
    cases = [pytest.param(module_name(path), read(path), id=str(path.relative_to(SOURCE))) for path in FILES]
    return pytest.mark.parametrize(("module", "tree"), cases)(rule)


def module_name(path: Path) -> str:
    """'training/loop.py' -> 'training.loop', 'data/__init__.py' -> 'data', '__init__.py' -> '__init__'."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def read(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def belongs(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


# Imports


def imports(tree: ast.AST, module: str, *, is_package: bool = False) -> Iterator[str]:
    """Full names of what a module imports, anywhere in it, also by `import_module` and `need`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = node.module or ""
            if node.level:
                parts = ["snugtune", *module.split(".")]
                kept = parts[: len(parts) - node.level + is_package]
                start = ".".join([*kept, start]).rstrip(".")
            yield from (f"{start}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = (
                node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            )
            if function in ("import_module", "need", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value


def module_level_imports(tree: ast.Module) -> Iterator[str]:
    """Full names of what loading a module imports: not in functions, not for type checkers only."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports(ast.Module(body=[node], type_ignores=[]), "")
        waiting.extend(ast.iter_child_nodes(node))


def row_of(module: str) -> tuple[str, int] | None:
    """The unit of the table that a module belongs to, and its row; None if the table does not have it.

    A package of which the table lists only members is as low as its lowest member.
    """
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in ROW:
            return name, ROW[name]
    members = [row for name, row in ROW.items() if name.startswith(module + ".")]
    return (module, min(members)) if members else None


def upward_imports(tree: ast.AST, module: str, *, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of a module: each one that does not go down."""
    here = row_of(module)
    if here is None:
        return [f"{module} has no row in the table of layers"]
    faults = []
    for name in imports(tree, module, is_package=is_package):
        if name.split(".")[0] != "snugtune" or name == "snugtune.__version__":
            continue
        there = row_of(name.removeprefix("snugtune").removeprefix(".")) or ("__init__", ROW["__init__"])
        same_package = there[0].split(".")[0] == here[0].split(".")[0]
        if there[1] > here[1] or (there[1] == here[1] and not same_package):
            faults.append(f"{module} (row {here[1]}) imports {name} (row {there[1]})")
    return faults


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_only_go_down(path: Path) -> None:
    assert not upward_imports(read(path), module_name(path), is_package=path.name == "__init__.py")


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("units", "import snugtune.record"),
        ("units", "from snugtune import record"),
        ("units", "from snugtune import train"),
        ("units", "import snugtune"),
        ("step", "def f():\n    from snugtune.training.loop import run"),
        ("step", "if TYPE_CHECKING:\n    from snugtune.planning import search"),
        ("step", "importlib.import_module('snugtune.api')"),
        ("record", "from snugtune.config import RunConfig"),
        ("training.loop", "from ..api import train"),
        ("data", "from ..tasks import Task"),
        ("monitor.sampler", "from snugtune.monitor.terminal import show"),
        ("monitor.sampler", "from .watch import watch"),
        ("surprise", "import os"),
    ],
)
def test_an_import_that_does_not_go_down_is_found(module: str, code: str) -> None:
    assert upward_imports(ast.parse(code), module, is_package=module == "data")


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("record", "from snugtune.errors import RunFolderError\nfrom snugtune import errors"),
        ("training.loop", "from snugtune.training.progress import console\nfrom . import checkpoints"),
        ("training", "from .loop import run"),
        ("monitor.terminal", "from snugtune.monitor.sampler import sample"),
        ("cli", "from snugtune import __version__, api"),
        ("__init__", "import_module('snugtune.api')"),
    ],
)
def test_an_import_that_goes_down_is_allowed(module: str, code: str) -> None:
    assert not upward_imports(ast.parse(code), module, is_package=module in ("training", "__init__"))


def slow_starts(tree: ast.Module, module: str) -> list[str]:
    """Slow packages that loading a module loads, though it should not."""
    packages = {name.split(".")[0] for name in module_level_imports(tree)}
    slow = packages & SLOW if belongs(module, STARTS_FAST) else set()
    if not belongs(module, MAY_LOAD_PYDANTIC):
        slow |= packages & {"pydantic"}
    return sorted(slow)


@every_file
def test_slow_packages_are_loaded_when_they_are_needed(module: str, tree: ast.Module) -> None:
    assert not slow_starts(tree, module)


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("hardware", "import torch"),
        ("data.readers", "from datasets import load_dataset"),
        ("api", "try:\n    import transformers.models\nexcept ImportError:\n    pass"),
        ("monitor.watch", "class A:\n    import torch"),
        ("step", "from pydantic import BaseModel"),
        ("cli", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch"),
    ],
)
def test_a_slow_package_at_the_top_is_found(module: str, code: str) -> None:
    assert slow_starts(ast.parse(code), module)


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("step", "import torch"),
        ("config", "import pydantic"),
        ("api", "def f():\n    import torch\nif typing.TYPE_CHECKING:\n    import datasets"),
        ("data", "from snugtune.datasets import x"),
    ],
)
def test_a_slow_package_in_its_place_is_allowed(module: str, code: str) -> None:
    assert not slow_starts(ast.parse(code), module)


def imports_accelerate(tree: ast.AST) -> bool:
    return any(name.split(".")[0] == "accelerate" for name in imports(tree, ""))


@every_file
def test_only_training_knows_accelerate(module: str, tree: ast.Module) -> None:
    assert belongs(module, ("training",)) or not imports_accelerate(tree)


@pytest.mark.parametrize(
    "code",
    ["def f():\n    from accelerate.utils import gather", "need('accelerate', extra='train', because='x')"],
)
def test_accelerate_is_found_wherever_it_hides(code: str) -> None:
    assert imports_accelerate(ast.parse(code))
    assert not imports_accelerate(ast.parse("version('accelerate')"))


def modules_after(code: str) -> set[str]:
    """Top-level packages that are loaded when a fresh process has run some code."""
    report = "import sys\ntry:\n    {}\nexcept SystemExit:\n    pass\nsys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", report.format(code)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    )
    return {name.split(".")[0] for name in done.stderr.splitlines()[-1].split()}


def test_importing_the_package_loads_nothing_slow() -> None:
    loaded = modules_after("import snugtune")
    assert "snugtune" in loaded
    assert not loaded & {"torch", "pydantic", "numpy"}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"]], ids=" ".join)
def test_help_loads_nothing_slow(arguments: list[str]) -> None:
    loaded = modules_after(f"from snugtune.cli import main; sys.argv = {['snugtune', *arguments]!r}; main()")
    assert "typer" in loaded
    # Typer itself loads pydantic, where it is installed, to convert the parameters of a command.
    assert not loaded & (SLOW | {"numpy"} | ({"pydantic"} if len(arguments) == 1 else set()))


def test_a_loaded_package_is_found() -> None:
    assert {"json", "snugtune"} <= modules_after("import snugtune.record; raise SystemExit")


# Sizes and names


def too_long(text: str) -> list[str]:
    """The file, and the functions in it, that are longer than they may be; docstrings do not count."""
    lines = text.count("\n") + (not text.endswith("\n"))
    faults = [f"the file has {lines} lines"] if lines > MOST_LINES_OF_A_FILE else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                docstring = node.body[0]
                size -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
            if size > MOST_LINES_OF_A_FUNCTION:
                faults.append(f"{node.name} has {size} lines")
    return faults


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_are_short(path: Path) -> None:
    assert not too_long(path.read_text("utf-8"))


def test_a_long_file_and_a_long_function_are_found() -> None:
    docstring = '    """' + "word\n" * 30 + '    """\n'
    just_right = "def f():\n" + docstring + "    pass\n" * 59
    assert not too_long(just_right)
    assert too_long(just_right + "    pass\n")
    assert not too_long("pass\n" * 350)
    assert too_long("pass\n" * 351)


def says_nothing(module: str) -> bool:
    return any(part.strip("_") in NAMES_THAT_SAY_NOTHING for part in module.split("."))


def test_every_module_has_a_name_that_says_something() -> None:
    assert not [path for path in FILES if says_nothing(module_name(path))]


@pytest.mark.parametrize("module", ["utils", "data.helpers", "common.files", "training._misc"])
def test_a_name_that_says_nothing_is_found(module: str) -> None:
    assert says_nothing(module)
    assert not says_nothing("units")


# Docstrings


def without_docstring(tree: ast.Module) -> list[str]:
    """The module itself, and its public functions and classes, that have no docstring."""
    faults = [] if ast.get_docstring(tree) else ["the module"]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            faults += [] if ast.get_docstring(node) else [node.name]
    return faults


@every_file
def test_modules_and_public_names_have_docstrings(module: str, tree: ast.Module) -> None:
    assert not without_docstring(tree)


def test_a_missing_docstring_is_found() -> None:
    code = '"""Module."""\nclass A:\n    pass\ndef b():\n    """B."""\ndef _c():\n    pass\n'
    assert without_docstring(ast.parse(code)) == ["A"]
    assert without_docstring(ast.parse("x = 1")) == ["the module"]


def undocumented(namespace: Any, names: list[str]) -> list[str]:
    """Functions and classes among some names without a docstring, or only with a dataclass's own."""
    faults = []
    for name in names:
        thing = getattr(namespace, name)
        if inspect.isroutine(thing) or inspect.isclass(thing):
            text = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
            if not text or text.startswith(f"{name}("):
                faults.append(name)
    return faults


def test_every_name_that_the_package_offers_has_a_docstring() -> None:
    assert snugtune.__all__
    assert not undocumented(snugtune, list(snugtune.__all__))


def test_an_undocumented_name_is_found() -> None:
    class Space:
        documented = staticmethod(module_name)
        bare = staticmethod(lambda: None)

        class BareError(ValueError):
            pass

    assert undocumented(Space, ["documented", "bare", "BareError"]) == ["bare", "BareError"]


# Safety


def unsafe(tree: ast.AST) -> list[str]:
    """Asserts (python -O drops them), pickle, and loading of weights that may run code."""
    faults = [f"imports {name}" for name in imports(tree, "") if name.split(".")[0] in UNSAFE]
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            faults.append(f"assert in line {node.lineno}")
        if isinstance(node, ast.Call):
            keywords = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
            if ast.unparse(node.func) == "torch.load" and keywords.get("weights_only") is not True:
                faults.append(f"torch.load without weights_only=True in line {node.lineno}")
            if keywords.get("allow_pickle") is True or ast.unparse(node.func).endswith(".read_pickle"):
                faults.append(f"reads a pickle in line {node.lineno}")
            if keywords.get("trust_remote_code") is True:
                faults.append(f"trusts remote code unasked in line {node.lineno}")
    return faults


@every_file
def test_nothing_unsafe_is_used(module: str, tree: ast.Module) -> None:
    assert not unsafe(tree)


@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    import pickle",
        "from joblib import load",
        "assert True",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=safe)",
        "numpy.load(path, allow_pickle=True)",
        "pandas.read_pickle(path)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_something_unsafe_is_found(code: str) -> None:
    assert unsafe(ast.parse(code))


def test_the_safe_forms_are_allowed() -> None:
    code = "torch.load(path, weights_only=True); load(x, trust_remote_code=settings.trust_remote_code)"
    assert not unsafe(ast.parse(code))


# Settings


def settings(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Dotted paths of all settings in a model and the models inside it."""
    for name, field in model.model_fields.items():
        inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if is_model(kind)]
        if inner:
            for kind in inner:
                yield from settings(kind, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def is_model(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, BaseModel)


def unread(names: list[str], trees: list[ast.Module]) -> list[str]:
    """Settings whose last name no code reads as an attribute."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    read_names = {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    return [name for name in names if name.rsplit(".")[-1] not in read_names]


def properties(tree: ast.Module) -> list[ast.Module]:
    """The properties of a module's classes: what they read is handed on under another name."""
    return [
        ast.Module(body=[node], type_ignores=[])
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and "property" in [ast.unparse(d) for d in node.decorator_list]
    ]


def test_every_setting_is_read_somewhere() -> None:
    from snugtune.config import RunConfig

    names = list(settings(RunConfig))
    assert len(names) > 5
    trees = [read(path) for path in FILES if module_name(path) != "config"]
    assert not unread(names, [*trees, *properties(read(SOURCE / "config.py"))])


def test_a_setting_that_nothing_reads_is_found() -> None:
    class Inner(BaseModel):
        rate: float
        unused: int | None

    class Outer(BaseModel):
        inner: Inner
        also: Inner | None
        seed: int

    names = list(settings(Outer))
    assert names == ["inner.rate", "inner.unused", "also.rate", "also.unused", "seed"]
    code = "print(config.inner.rate, config.seed)\nconfig.unused = 1"
    assert unread(names, [ast.parse(code)]) == ["inner.unused", "also.unused"]
