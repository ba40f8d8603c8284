"""Models and tokenizers in Hugging Face format, from a folder or the hub."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from snugtune.config import ModelSettings
from snugtune.errors import ModelError, SnugtuneError
from snugtune.hub import hub_errors

_log = logging.getLogger(__name__)

# transformers sets a larger one where a tokenizer has no limit of its own.
_NO_LIMIT = 10**6

# These count positions from the padding token's number + 1, so they take that many tokens less than they
# have positions.
_POSITIONS_AFTER_PADDING = frozenset(
    {
        *("roberta", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "camembert", "mpnet", "xmod"),
        *("data2vec-text", "longformer", "ibert", "lilt", "luke", "markuplm", "layoutlmv3", "esm"),
    }
)


def load_config(settings: ModelSettings) -> Any:
    """The model's configuration.

    Raises:
        ModelError, HubError: There is none, or it cannot be fetched.
    """
    from transformers import AutoConfig

    with _model_errors(settings):
        return AutoConfig.from_pretrained(settings.name, **_source(settings))


def load_tokenizer(settings: ModelSettings) -> Any:
    """The model's tokenizer, with a padding token.

    Raises:
        ModelError, HubError: There is none, or it cannot be fetched.
    """
    from transformers import AutoTokenizer

    with _model_errors(settings):
        tokenizer = AutoTokenizer.from_pretrained(settings.name, **_source(settings))
    # Without its files transformers makes a tokenizer of special tokens, to which every text is unknown.
    if len(tokenizer) <= len(set(tokenizer.all_special_tokens)) + 2:
        raise ModelError(
            f"the model {settings.name!r} has no tokenizer",
            why="its vocabulary (tokenizer.json, vocab.txt or the like) is not there",
            do="put the tokenizer's files beside config.json",
        )
    if tokenizer.pad_token is None:
        # Language models often have none. The attention mask hides it, so any token will do.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token is None:
        raise ModelError(
            f"the tokenizer of {settings.name!r} has no padding token",
            why="it has no end and no unknown token either, one of which would do",
            do='name one of its tokens as "pad_token" in its tokenizer_config.json',
        )
    return tokenizer


def load_model(auto_class: Any, settings: ModelSettings, *, new_head: bool = True, **options: Any) -> Any:
    """The pretrained model with fp32 weights on the CPU; a new head where the task needs one.

    Args:
        auto_class: One of transformers' Auto classes.
        settings: Which model.
        new_head: Whether the head may be new; it answers at random until it is trained.
        options: What the head needs, such as num_labels.

    Raises:
        ModelError, HubError: It cannot be loaded or fetched.
    """
    with _model_errors(settings), quiet_transformers():
        model, found = auto_class.from_pretrained(
            settings.name,
            dtype=torch.float32,
            use_safetensors=None if settings.allow_pickle else True,
            ignore_mismatched_sizes=True,  # a head that was trained for other labels is replaced
            output_loading_info=True,
            **_source(settings),
            **options,
        )
    _check_loaded(model, found, settings.name, new_head=new_head)
    return model


def _check_loaded(model: Any, found: dict[str, Any], name: str, *, new_head: bool) -> None:
    """At most a head may be new; a body of random numbers is not the pretrained model."""
    sizes = [key[0] if isinstance(key, tuple) else key for key in found["mismatched_keys"]]
    body = model.base_model_prefix + "."
    wrong = [key for key in sizes if key.startswith(body)]
    missing = [key for key in found["missing_keys"] if key.startswith(body) and ".pooler." not in key]
    if wrong or missing:
        raise ModelError(
            f"the model {name!r} does not have the weights that its config.json describes",
            why=f"{(wrong + missing)[0]} is {'of another size' if wrong else 'not there'}"
            f" ({len(wrong) + len(missing)} such weights); they would be random numbers",
            do="take the config.json that belongs to these weights",
        )
    new = sorted({*sizes, *found["missing_keys"]})
    if new and not new_head:
        raise ModelError(
            f"the model {name!r} lacks weights that it was trained with",
            why=f"{new[0]} is not there or of another size; it would be random numbers",
            do="put its own model.safetensors back",
        )
    if new:
        _log.info("new weights, to be learnt from nothing: %s", ", ".join(new))


def token_limit(tokenizer: Any, model_config: Any) -> int:
    """The longest text the model takes, in tokens."""
    positions = getattr(model_config, "max_position_embeddings", None)
    if positions and model_config.model_type in _POSITIONS_AFTER_PADDING:
        positions -= model_config.pad_token_id + 1
    limits = [tokenizer.model_max_length, positions]
    return int(min((limit for limit in limits if limit and 0 < limit < _NO_LIMIT), default=_NO_LIMIT))


def save_model(model: Any, folder: Path, *, tokenizer: Any, limit: int) -> None:
    """Write model and tokenizer in Hugging Face format.

    Args:
        model: A transformers model.
        folder: Where; it is made.
        tokenizer: Its tokenizer.
        limit: Longest text it was trained on, in tokens; where longer ones are cut off in use too.
    """
    with quiet_transformers():
        model.save_pretrained(folder)
        # safetensors makes files that only their owner may read.
        for weights in folder.glob("*.safetensors"):
            shutil.copymode(folder / "config.json", weights)
        tokenizer.model_max_length = limit
        tokenizer.save_pretrained(folder)


def _source(settings: ModelSettings) -> dict[str, Any]:
    return {"revision": settings.revision or "main", "trust_remote_code": settings.trust_remote_code}


@contextmanager
def _model_errors(settings: ModelSettings) -> Iterator[None]:
    """Turn what transformers raises about a model into what, why and do."""
    try:
        with hub_errors(settings.name):
            yield
    except SnugtuneError:
        raise
    except Exception as error:  # broken files raise whatever their reader trips over
        text = " ".join(str(error).split())
        if "Weights only load failed" in text:
            raise _objects_in(settings.name, text) from error
        do = "give a folder that has config.json, model.safetensors and the tokenizer's files, or a hub id"
        if "trust_remote_code" in text:
            do = "if you trust its authors: --set model.trust_remote_code=true"
        elif isinstance(error, SafetensorError):
            do = (
                "its weights are damaged, incomplete or only a Git LFS pointer: fetch model.safetensors again"
            )
        elif "safetensors" in text and not settings.allow_pickle:
            do = "if it has only .bin files: --set model.allow_pickle=true (read with weights_only=True)"
        raise ModelError(f"cannot load the model {settings.name!r}", why=text[:500], do=do) from error


def _objects_in(name: str, text: str) -> ModelError:
    """A .bin file that is more than tensors. torch's own advice is to read it without the check."""
    found = re.search(r"(?:GLOBAL|global|class) ([\w.]+\.[\w.]+)", text.partition("Unsupported")[2])
    return ModelError(
        f"cannot load the model {name!r}",
        why=f"beside tensors its .bin file holds Python objects{f' ({found[1]})' if found else ''}, and "
        "reading those may run code",
        do="ask for its model.safetensors; if you trust the file, write one in a program of your own: "
        "torch.load with weights_only=True inside torch.serialization.safe_globals([...]), which names the "
        "objects, then safetensors.torch.save_file of the tensors",
    )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep its warnings and bars away while the program says the same in its own words."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def ask(model: Path, texts: Sequence[str]) -> list[str]:
    """The labels that a finished model gives to texts.

    Args:
        model: Its folder.
        texts: The texts.
    """
    from transformers import pipeline

    with quiet_transformers():
        classify = pipeline("text-classification", str(model))
        return [answer["label"] for answer in classify(list(texts))]
