"""Decoders keep no keys while they learn, and say afterwards what they said before."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers
from torch import nn
from transformers.utils import logging as transformers_logging

from snugtune.step import Choices, Hyperparameters, Step
from snugtune.tasks import Task
from snugtune.tasks.caching import caching_configs

SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def llama(use_cache: bool = True) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=20, num_key_value_heads=2, use_cache=use_cache, **SHAPE)
    return transformers.LlamaForCausalLM(config)


def step_of(model: nn.Module, layers: int | str = "all") -> Step:
    seen = []

    def loss(model, batch):
        answer = model(input_ids=batch["ids"])
        seen.append(any(isinstance(part, transformers.Cache) for part in answer.values()))
        logits = answer.logits[:, :-1].flatten(0, 1)
        labels = batch["ids"][:, 1:].flatten()
        return nn.functional.cross_entropy(logits, labels, reduction="sum"), len(labels)

    task = Task(build_model=lambda: model, loss=loss)
    choices = Choices(checkpointed_layers=layers)
    step = Step(task, choices, Hyperparameters(), device=torch.device("cpu"))
    step.seen = seen
    return step


IDS = {"ids": torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]])}


@pytest.mark.parametrize("own", [False, True], ids=["ours", "the model's own"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_training_keeps_no_keys_and_the_configuration_stays(use_cache, own, tmp_path, caplog):
    """C065: in memory, in the saved configuration, in generation; at most one line in the log."""
    model = llama(use_cache)
    if own:
        model._activation_checkpointing_enable({"use_reentrant": False}) if hasattr(
            model, "_activation_checkpointing_enable"
        ) else model.gradient_checkpointing_enable({"use_reentrant": False})
    step = step_of(model, 0 if own else "all")
    transformers_logging.set_verbosity_warning()
    transformers_logging.enable_propagation()
    try:
        for number in range(3):
            assert step.update([IDS], number=number, learning_rate=1e-3).applied
    finally:
        transformers_logging.disable_propagation()
    assert step.seen == [False] * 3
    assert model.config.use_cache is use_cache
    step.evaluate(IDS)
    assert step.seen[3:] == [use_cache]
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["use_cache"] is use_cache
    assert sum("cache" in message.lower() for message in caplog.messages) <= 1
    plain = llama(use_cache).eval()
    plain.load_state_dict(model.state_dict())
    text = IDS["ids"][:1]
    answers = [each.eval().generate(text, max_new_tokens=6, do_sample=False) for each in (model, plain)]
    assert torch.equal(*answers)


def test_every_configuration_in_a_model_is_found_once():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = llama(), llama(use_cache=False)

    model = Two()
    found = caching_configs(model)
    assert found == [model.one.config]
    assert caching_configs(nn.Linear(2, 2)) == []
    assert copy.deepcopy(found[0]).use_cache is True
