"""The hub's names, and real child processes against a hub on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hub_server import serve
from snugtune.hub import hub_errors, is_local

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]
ONE_ROUND_OF_RETRIES = 20  # seconds; the hub's library waits 23 between its tries
LOAD = {
    "tokenizer": "from transformers import AutoTokenizer as T; found = T.from_pretrained(name)",
    "model": "import transformers as t; found = t.AutoModelForSequenceClassification.from_pretrained(name)",
    "config": "from transformers import AutoConfig as C; found = C.from_pretrained(name)",
    "data set": "from snugtune.data.readers import read_table; found = read_table(name)",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree with a BERT of two layers and a data set of two rows."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    root = tmp_path_factory.mktemp("hub")
    tiny = root / "models" / "owner" / "tiny"
    tiny.mkdir(parents=True)
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    BertForSequenceClassification(BertConfig(vocab_size=len(WORDS), **sizes)).save_pretrained(tiny)
    vocabulary = root / "vocab.txt"
    vocabulary.write_text("\n".join(WORDS), encoding="utf-8")
    BertTokenizerFast.from_pretrained(root).save_pretrained(tiny)
    reviews = root / "datasets" / "owner" / "reviews"
    reviews.mkdir(parents=True)
    (reviews / "train.csv").write_text("text,label\ngood film,pos\nbad film,neg\n", encoding="utf-8")
    many = root / "datasets" / "owner" / "many"
    many.mkdir(parents=True)
    rows = [f"good film {number},pos\nbad film {number},neg\n" for number in range(10)]
    (many / "train.csv").write_text("text,label\n" + "".join(rows), encoding="utf-8")
    return root


CHILD = """
import json, sys, time
from contextlib import nullcontext
from snugtune.hub import hub_errors, quiet_hub
quiet_hub()
import datasets
from huggingface_hub import constants
from transformers import AutoModelForSequenceClassification, AutoTokenizer
offline = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
results = []
for kind, name, code in json.loads(sys.argv[1]):
    values, result, started = {"name": name}, {}, time.monotonic()
    try:
        with nullcontext() if kind == "data set" else hub_errors(name):  # reading has its own
            exec(code, values)
        found = values["found"]
        result["found"] = [type(found).__name__, len(found) if hasattr(found, "__len__") else None]
    except Exception as error:
        result.update(error=type(error).__name__, says=str(error))
    results.append({**result, "seconds": time.monotonic() - started})
assert (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE) == offline
print(json.dumps(results))
"""


def load(things: list[tuple[str, str]], *, cache: Path, **environment: str) -> dict[str, dict[str, Any]]:
    """Load (kind, name) after (kind, name) in one new process: what was found, or its error, and the time."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS"))
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps([(kind, name, LOAD[kind]) for kind, name in things])],
        env={**clean, "HF_HOME": str(cache), **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    return {f"{kind} {name}": result for (kind, name), result in zip(things, results, strict=True)}


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_names_and_paths_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "here").mkdir(parents=True)
    assert [name for name in ("bert-base", "owner/name", "owner/here") if is_local(name)] == ["owner/here"]
    for name in ("./name", "../name", "/name", "~/name", "a/b/c", "C:\\name", "名字", "", tmp_path / "no"):
        assert is_local(name), name


def test_errors_of_others_pass_through(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"), hub_errors(str(tmp_path)):
        raise KeyError("mine")


def test_a_mirror_fills_the_cache_and_the_cache_works_without_it(folder: Path, tmp_path: Path) -> None:
    things = [("tokenizer", "owner/tiny"), ("model", "owner/tiny"), ("data set", "owner/reviews")]
    with serve(folder) as hub:
        first = load(things, cache=tmp_path, HF_ENDPOINT=hub.url)
        asked = list(hub.requests)
    assert [result.get("found", result) for result in first.values()] == [
        ["BertTokenizer", len(WORDS)],
        ["BertForSequenceClassification", None],
        ["Dataset", 2],
    ]
    assert any("/resolve/" in request for request in asked)
    for setting in ({"HF_HUB_OFFLINE": "1"}, {}):  # told to be offline, or finding the hub gone
        again = load(things, cache=tmp_path, HF_ENDPOINT=hub.url, **setting)
        for thing in first:
            assert again[thing].get("found") == first[thing]["found"], again
            assert again[thing]["seconds"] < ONE_ROUND_OF_RETRIES


def test_an_unreachable_hub_fails_at_once_and_shows_the_ways_out(tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{closed_port()}"
    ways = ("owner/tiny", endpoint, "HF_ENDPOINT", "hf-mirror.com", "folder", "HF_HUB_OFFLINE", "refused")
    for result in load(
        [(kind, "owner/tiny") for kind in LOAD], cache=tmp_path, HF_ENDPOINT=endpoint
    ).values():
        assert result["error"] == "HubError", result
        assert [way for way in ways if way not in result["says"]] == []
        assert result["seconds"] < ONE_ROUND_OF_RETRIES


def test_offline_without_the_cache_says_so(tmp_path: Path) -> None:
    for result in load([(kind, "owner/tiny") for kind in LOAD], cache=tmp_path, HF_HUB_OFFLINE="1").values():
        assert result["error"] == "HubError", result
        assert "HF_HUB_OFFLINE is set" in result["says"]
        assert str(tmp_path) in result["says"]


def test_what_the_hub_refuses_is_explained(folder: Path, tmp_path: Path) -> None:
    names = {"owner/absent": "check the spelling", "owner/x-gated": "ask for access"}
    with serve(folder) as hub:
        results = load([(kind, name) for kind in LOAD for name in names], cache=tmp_path, HF_ENDPOINT=hub.url)
    for thing, result in results.items():
        name = thing.split()[-1]
        assert result["error"] == "HubError", result
        assert name in result["says"]
        assert names[name] in result["says"]


def test_a_hub_that_accepts_and_never_answers_is_given_up(tmp_path: Path) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(8)
        endpoint = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        things = [("config", "owner/tiny")]
        found = load(things, cache=tmp_path, HF_ENDPOINT=endpoint, HF_HUB_ETAG_TIMEOUT="1")
    assert found["config owner/tiny"]["error"] == "HubError", found
    assert found["config owner/tiny"]["seconds"] < ONE_ROUND_OF_RETRIES


def test_a_repository_without_weights_is_not_the_hubs_fault(folder: Path, tmp_path: Path) -> None:
    bare = folder / "models" / "owner" / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((folder / "models" / "owner" / "tiny" / "config.json").read_bytes())
    with serve(folder) as hub:
        found = load([("model", "owner/bare")], cache=tmp_path, HF_ENDPOINT=hub.url)
    assert found["model owner/bare"]["error"] == "OSError", found


def train(output: Path, *, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Train the hub's model on the hub's data set by the command."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS"))
    }
    command = [
        "train",
        "--model",
        "owner/tiny",
        "--data",
        "owner/many",
        "--epochs",
        "1",
        "--output",
        str(output),
    ]
    return subprocess.run(
        [sys.executable, "-m", "snugtune", *command],
        env={**clean, "HF_HOME": str(cache), **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_training_takes_model_and_data_from_a_mirror_and_then_from_the_cache(
    folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    with serve(folder) as hub:
        first = train(tmp_path / "mirror", cache=cache, HF_ENDPOINT=hub.url)
    assert first.returncode == 0, first.stderr
    second = train(tmp_path / "offline", cache=cache, HF_HUB_OFFLINE="1")
    assert second.returncode == 0, second.stderr
    weights = [
        (tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("mirror", "offline")
    ]
    assert weights[0] == weights[1]
    gone = train(tmp_path / "gone", cache=tmp_path / "empty", HF_ENDPOINT=f"http://127.0.0.1:{closed_port()}")
    assert gone.returncode == 1
    assert "hf-mirror.com" in gone.stderr
    assert "folder" in gone.stderr
    assert "Traceback" not in gone.stderr
