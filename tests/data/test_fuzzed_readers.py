"""Damaged files are read or refused in words: never a traceback, never a hang."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from datasets import List
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import snugtune
from fuzzed_files import KINDS, fuzzed_file
from snugtune.data.readers import read_table
from snugtune.errors import SnugtuneError


def labels_are_lists(path: Path) -> bool:
    """Whether a row may have several labels, or none: then they are not as many as the rows."""
    if path.suffix not in (".parquet", ".arrow"):
        return False
    return isinstance(read_table(path).features["label"], List)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32))
@settings(
    max_examples=40,
    deadline=None,  # pytest ends what hangs
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_damaged_file_is_read_or_refused_in_words(
    kind: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    name, content = fuzzed_file(kind, seed)
    (tmp_path / name).write_bytes(content)
    try:
        for bad_rows in ("stop", "skip"):
            found = snugtune.check_data(tmp_path / name, set={"data.bad_rows": bad_rows})
            assert found.rows == found.kept + found.refused
            if bad_rows == "skip" and not found.stops and found.labels:
                if labels_are_lists(tmp_path / name):
                    assert all(0 < rows <= found.kept for rows in found.labels.values())
                else:
                    assert sum(found.labels.values()) == found.kept
    except SnugtuneError:
        pass
    finally:
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
