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


def build_t5() -> nn.Module:
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2}
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=20, decoder_start_token_id=0, **shape)
    return transformers.T5ForConditionalGeneration(config).train()


@pytest.mark.parametrize("count", [2, 4, "all"])
@pytest.mark.parametrize("kind", ["t5", "gpt2"])
def test_the_keys_that_a_decoder_keeps_for_its_next_token_do_not_disturb_the_second_run(kind, count):
    config = CONFIGS["gpt2"]
    plain = build_t5() if kind == "t5" else transformers.GPT2LMHeadModel(config).train()
    checkpointed = copy.deepcopy(plain)
    layers = checkpointable_layers(checkpointed)
    assert len(layers) == {"t5": 6, "gpt2": 3}[kind]
    calls = count_calls(layers)
    wanted = checkpoint_layers(checkpointed, count)
    ids = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]])
    gradients = []
    for model in (plain, checkpointed):
        torch.manual_seed(3)
        model(input_ids=ids, labels=ids, use_cache=True).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)
    assert [calls[number] for number in range(len(layers))] == [2] * wanted + [1] * (len(layers) - wanted)


def test_a_decoder_still_keeps_them_where_it_does_not_learn():
    model = transformers.GPT2LMHeadModel(CONFIGS["gpt2"]).eval()
    checkpoint_layers(model, "all")
    text = torch.tensor([[5, 6, 7]])
    plain = transformers.GPT2LMHeadModel(CONFIGS["gpt2"]).eval()
    plain.load_state_dict(model.state_dict())
    answers = [
        each.generate(text, max_new_tokens=5, do_sample=False, use_cache=True) for each in (model, plain)
    ]
    assert torch.equal(answers[0], answers[1])


def test_of_stages_and_the_layers_in_them_only_the_layers_are_taken():
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4
    )
    model = transformers.SwinModel(config).train()
    layers = checkpointable_layers(model)
    assert {type(layer).__name__ for layer in layers} == {"SwinLayer"}
    calls = count_calls(layers)
    assert checkpoint_layers(model, "all") == 4
    model(torch.ones(1, 3, 32, 32)).pooler_output.sum().backward()
    assert dict(calls) == dict.fromkeys(range(4), 2)


def test_a_run_of_like_layers_is_found_between_others():
    class Block(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), *(Block(4, 4) for _ in range(3)), nn.ReLU(), nn.Linear(4, 2))
    assert checkpointable_layers(model) == list(model[1:4])
    assert checkpointable_layers(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == []


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
