"""Facts that change without the code: TOML files in this folder, each fact with its source and date."""

from __future__ import annotations

import sys
from functools import cache
from importlib.resources import files
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@cache
def read(name: str) -> dict[str, Any]:
    """Return the facts of one file, `name` being "builds" for builds.toml. Callers must not change them."""
    return tomllib.loads((files(__name__) / f"{name}.toml").read_text(encoding="utf-8"))
