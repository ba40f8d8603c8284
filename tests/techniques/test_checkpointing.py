"""Which layers are computed a second time, and that nothing but memory and time changes."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import transformers
from torch import nn

from snugtune.techniques.checkpointing import checkpoint_layers, checkpointable_layers

SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
CONFIGS = {
    "bert": transformers.BertConfig(vocab_size=20, **SMALL),
    "roberta": transformers.RobertaConfig(vocab_size=20, **SMALL),
    "distilbert": transformers.DistilBertConfig(vocab_size=20, dim=16, n_layers=3, n_heads=2, hidden_dim=32),
    "gpt2": transformers.GPT2Config(vocab_size=20, n_embd=16, n_layer=3, n_head=2, pad_token_id=0),
    "llama": transformers.LlamaConfig(vocab_size=20, num_key_value_heads=2, pad_token_id=0, **SMALL),
    "vit": transformers.ViTConfig(image_size=8, patch_size=4, **SMALL),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = CONFIGS[name]
    if name == "vit":
        return transformers.ViTForImageClassification(config).train()
    return transformers.AutoModelForSequenceClassification.from_config(config).train()


def batch(name: str) -> dict[str, torch.Tensor]:
    if name == "vit":
        return {"pixel_values": torch.ones(2, 3, 8, 8)}
    ids = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def count_calls(layers: list[nn.Module]) -> Counter[int]:
    """Count how often the body of each layer runs; to be called before layers are checkpointed."""
    calls: Counter[int] = Counter()
    for number, layer in enumerate(layers):
        first = next(module for module in layer.modules() if not list(module.children()))
        first.register_forward_hook(lambda *_, number=number: calls.update([number]))
    return calls


@pytest.mark.parametrize("name", CONFIGS)
def test_the_first_layers_run_twice_and_the_others_once(name):
    model = build(name)
    layers = checkpointable_layers(model)
    assert len(layers) == 3
    calls = count_calls(layers)
    assert checkpoint_layers(model, 2) == 2
    model(**batch(name)).logits.sum().backward()
    assert dict(calls) == {0: 2, 1: 2, 2: 1}


@pytest.mark.parametrize("name", CONFIGS)
def test_answers_and_gradients_are_those_of_the_plain_model(name):
    plain = build(name)
    checkpointed = copy.deepcopy(plain)
    checkpoint_layers(checkpointed, "all")
    results = []
    for model in (plain, checkpointed):
        torch.manual_seed(3)  # dropout is on
        logits = model(**batch(name)).logits
        logits.square().sum().backward()
        results.append((logits, [parameter.grad for parameter in model.parameters()]))
    assert torch.equal(results[0][0], results[1][0])
    for one, other in zip(results[0][1], results[1][1], strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=0, atol=1e-6)


def test_another_count_replaces_the_one_before_and_zero_restores_the_model():
    model = build("bert")
    layers = checkpointable_layers(model)
    calls = count_calls(layers)
    for count, expected in ((3, [2, 2, 2]), (1, [2, 1, 1]), (0, [1, 1, 1]), ("all", [2, 2, 2])):
        calls.clear()
        checkpoint_layers(model, count)
        model(**batch("bert")).logits.sum().backward()
        assert [calls[number] for number in range(3)] == expected
    checkpoint_layers(model, 0)
    assert all("forward" not in vars(layer) for layer in layers)


def test_more_layers_than_there_are_means_all_of_them():
    assert checkpoint_layers(build("bert"), 99) == 3


def test_without_gradients_nothing_runs_twice():
    model = build("bert")
    calls = count_calls(checkpointable_layers(model))
    checkpoint_layers(model, "all")
    with torch.no_grad():
        model(**batch("bert"))
    assert dict(calls) == {0: 1, 1: 1, 2: 1}


def test_a_layer_that_the_model_shares_is_found():
    config = transformers.AlbertConfig(vocab_size=20, embedding_size=8, **SMALL)
    model = transformers.AutoModelForSequenceClassification.from_config(config).train()
    assert len(checkpointable_layers(model)) == 1


def test_in_any_model_the_longest_run_of_like_layers_is_taken():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(x).relu()

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(Block() for _ in range(5))), nn.Linear(4, 2))
    assert checkpointable_layers(model) == list(model[1])
    assert checkpointable_layers(nn.Linear(2, 2)) == []
    assert checkpoint_layers(nn.Linear(2, 2), "all") == 0


def test_frozen_inputs_do_not_stop_the_gradient():
    model = build("bert")
    for parameter in model.bert.embeddings.parameters():
        parameter.requires_grad_(False)
    checkpoint_layers(model, "all")
    model(**batch("bert")).logits.sum().backward()
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert missing == []
