"""Which layers are computed a second time, and that nothing but memory and time changes."""

from __future__ import annotations

import copy
import logging
import warnings
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
import transformers
from torch import nn

from snugtune.errors import ModelError
from snugtune.step import Choices, Hyperparameters, Step
from snugtune.tasks import Task
from snugtune.techniques.checkpointing import Checkpointing, checkpoint_layers, checkpointable_layers
from snugtune.training.assembly import decide_checkpointing

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


# What goes wrong elsewhere


class Block(nn.Module):
    """A layer with dropout and BatchNorm, if asked for."""

    def __init__(self, *, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.norm(self.inner(x)).tanh())


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(4, 8), nn.ModuleList(blocks), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def stack_task(make: Callable[[], nn.Module], *, frozen_first: bool = False) -> Task:
    def build() -> nn.Module:
        model = Stack([make() for _ in range(3)])
        model.first.requires_grad_(not frozen_first)
        return model

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])

    return Task(build_model=build, loss=loss)


def stack_step(task: Task, layers: int | str) -> Step:
    choices = Choices(optimizer="sgd", checkpointed_layers=layers)
    return Step(task, choices, Hyperparameters(weight_decay=0.0), device=torch.device("cpu"))


def points(rows: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {"x": torch.randn(rows, 4, generator=generator), "y": torch.arange(rows) % 2}


def test_the_reentrant_variant_would_train_nothing_behind_frozen_layers_and_ours_trains_all():
    """C063: with the control that the fault is there."""
    task = stack_task(Block, frozen_first=True)
    model = task.build_model()
    hidden = model.first(points()["x"])
    with pytest.warns(UserWarning, match="None of the inputs"):
        torch.utils.checkpoint.checkpoint(model.blocks[0], hidden, use_reentrant=True)
    step = stack_step(task, "all")
    step.update([points()], number=0, learning_rate=0.1)
    assert step.checkpointed == 3
    assert not step.without_gradient


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("block", [{"dropout": 0.5}, {"norm": True}, {"dropout": 0.5, "norm": True}], ids=str)
def test_nothing_changes_with_dropout_and_statistics_are_updated_once(block, passes):
    """C068: the same weights, and the same running means, after three updates."""
    task = stack_task(lambda: Block(**block))
    steps = [stack_step(task, layers) for layers in (0, "all")]
    for step in steps:
        for number in range(3):
            parts = [dict(zip(points(), each, strict=True)) for each in zip(
                *(column.tensor_split(passes) for column in points().values()), strict=True
            )]  # fmt: skip
            assert step.update(parts, number=number, learning_rate=0.1).applied
    one, other = (step.model.state_dict() for step in steps)
    for name in one:
        torch.testing.assert_close(other[name], one[name], rtol=0, atol=1e-6)
    if "norm" in block:
        assert int(other["blocks.0.norm.num_batches_tracked"]) == 3 * passes


def test_pytorch_alone_counts_batchnorm_twice():
    """C068: the control."""
    norm = nn.BatchNorm1d(8)
    x = torch.randn(4, 8, requires_grad=True)
    torch.utils.checkpoint.checkpoint(norm, x, use_reentrant=False).sum().backward()
    assert int(norm.num_batches_tracked) == 2


class Codebook(nn.Module):
    """A variant of C068: uses in its forward pass what it changes there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.mean(dim=0))
        return x + self.inner(x * self.mean.clone())


def test_what_a_layer_changes_and_uses_is_the_same_the_second_time():
    steps = [stack_step(stack_task(Codebook), layers) for layers in (0, "all")]
    for step in steps:
        for number in range(3):
            step.update([points()], number=number, learning_rate=0.1)
    one, other = (step.model.state_dict() for step in steps)
    for name in one:
        torch.testing.assert_close(other[name], one[name], rtol=0, atol=1e-6)


class Fickle(nn.Module):
    """Computes in another width at every other call, unless it is calm."""

    def __init__(self, *, calm: bool = False) -> None:
        super().__init__()
        self.inner, self.calls, self.calm = nn.Linear(8, 8), 0, calm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        width = 8 if self.calls % 2 or self.calm else 4
        return x + self.inner(x)[:, :width].square().mean(dim=1, keepdim=True)


def test_a_layer_that_does_not_repeat_itself_is_named_and_left_out(caplog):
    """C066: the run goes on, and the other layers stay checkpointed."""
    calm = iter([True, False, True])
    step = stack_step(stack_task(lambda: Fickle(calm=next(calm))), "all")
    with caplog.at_level(logging.WARNING, "snugtune"):
        for number in range(3):
            assert step.update([points()], number=number, learning_rate=0.1).applied
    (message,) = caplog.messages
    assert "non-repeatable forward in blocks.1" in message
    assert step.checkpointed == 2
    assert "forward" not in vars(step.model.blocks[1])
    assert "forward" in vars(step.model.blocks[2])


def test_several_such_layers_are_all_left_out_and_the_update_is_that_of_a_plain_step():
    class Steady(Fickle):
        """Saves other tensors the second time, but computes the same."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            inner = self.inner(x)
            for _ in range(20 - self.calls):
                inner = inner.exp().log()
            return x + inner

    batch = points()
    ends = []
    for layers in (0, "all"):
        step = stack_step(stack_task(Steady), layers)
        step.update([batch], number=0, learning_rate=0.1)
        ends.append(step)
    assert ends[1].checkpointed == 0
    for one, other in zip(ends[0].model.parameters(), ends[1].model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_a_block_of_somebody_elses_checkpointing_is_explained():
    class Own(Fickle):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    step = stack_step(stack_task(Own), 0)
    with pytest.raises(ModelError, match="cannot be checkpointed") as caught:
        step.update([points()], number=0, learning_rate=0.1)
    assert "leave torch.utils.checkpoint out" in caught.value.do


@pytest.mark.parametrize("reentrant", [False, True, None])
def test_checkpointing_that_a_model_came_with_is_kept_non_reentrant_and_without_a_warning(reentrant):
    """C069: one place configures it, and says what is in effect."""
    model = build("bert")
    model.bert.embeddings.requires_grad_(False)
    how = None if reentrant is None else {"use_reentrant": reentrant}
    if hasattr(model, "_activation_checkpointing_enable"):
        model._activation_checkpointing_enable(how)
    else:
        model.gradient_checkpointing_enable(how)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return model(**batch).logits.square().sum(), 2

    calls = count_calls(checkpointable_layers(model))
    step = stack_step(Task(build_model=lambda: model, loss=loss), 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.update([batch("bert")], number=0, learning_rate=0.1)
    assert not caught
    assert dict(calls) == {0: 2, 1: 2, 2: 2}
    assert not step.without_gradient
    decision = decide_checkpointing(step.checkpointing)
    assert decision.value == 3
    assert "came with gradient checkpointing" in decision.because
    assert "non-reentrant" in decision.because


def test_what_is_in_effect_is_said():
    some, none = (
        decide_checkpointing(Checkpointing(build(name) if name else nn.Linear(2, 2), 2))
        for name in ("bert", "")
    )
    assert (some.value, "of 3 layers" in some.because) == (2, True)
    assert (none.value, "no layers were found" in none.because) == (0, True)
