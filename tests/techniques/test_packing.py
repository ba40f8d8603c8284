"""Layers that see tokens only give the answers and gradients of padded rows."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from snugtune.errors import ModelError
from snugtune.step import Choices, Hyperparameters, Step
from snugtune.tasks import Task
from snugtune.techniques import row_attention
from snugtune.techniques.row_attention import Layout

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "num_labels": 3,
    "pad_token_id": 0,
}


def build(kind: str, **more: object) -> nn.Module:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    shape = {**SHAPE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **more}
    if kind == "distilbert":
        names = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
        names |= {"intermediate_size": "hidden_dim", "hidden_dropout_prob": "dropout"}
        names |= {"attention_probs_dropout_prob": "attention_dropout"}
        shape = {names.get(name, name): value for name, value in shape.items()} | {"seq_classif_dropout": 0.0}
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(AutoConfig.for_model(kind, **shape))


def make_batch(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(rows, tokens, dtype=torch.long)
    ids = torch.randint(5, 40, (rows, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(rows) % 3}


def padded(lengths: list[int], *, left: bool = False) -> dict[str, torch.Tensor]:
    batch = make_batch(len(lengths), max(lengths))
    for row, length in enumerate(lengths):
        padding = slice(0, max(lengths) - length) if left else slice(length, None)
        batch["attention_mask"][row, padding] = 0
        batch["input_ids"][row, padding] = 0
    return batch


def logits(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()


def make_step(kind: str, *, packing: bool, **choices: object) -> Step:
    task = Task(
        build_model=lambda: build(kind),
        loss=lambda model, batch: (
            F.cross_entropy(logits(model, batch), batch["labels"], reduction="sum"),
            len(batch["labels"]),
        ),
        outputs=lambda model, batch: {"logits": logits(model, batch)},
        measure=lambda outputs: {},
        example_batch=make_batch,
    )
    chosen = Choices(**{"optimizer": "sgd", **choices}, packing=packing)  # type: ignore[arg-type]
    hyperparameters = Hyperparameters(learning_rate=1.0, weight_decay=0.0, clip_grad_norm=None)
    return Step(task, chosen, hyperparameters, device=CPU)


def gradients(step: Step, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The change of an update by SGD with a rate of one: its first momentum is the gradient itself."""
    before = {name: parameter.detach().clone() for name, parameter in step.model.named_parameters()}
    assert step.update([batch], number=0, learning_rate=1.0).applied
    return {name: before[name] - parameter.detach() for name, parameter in step.model.named_parameters()}


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra"])
@pytest.mark.parametrize("checkpointed", [0, 2, "all"])
@pytest.mark.parametrize("price", [0, 10**6], ids=["many groups", "one group"])
def test_gradients_and_answers_are_those_of_padded_rows(kind, checkpointed, price):
    plain = make_step(kind, packing=False)
    packed = make_step(kind, packing=True, checkpointed_layers=checkpointed)
    assert packed.packing is not None
    packed.packing.price_tokens = price
    batch = padded([19, 12, 12, 7, 3, 1])
    torch.testing.assert_close(
        packed.evaluate(batch)["logits"], plain.evaluate(batch)["logits"], rtol=0, atol=1e-6
    )
    expected, found = gradients(plain, batch), gradients(packed, batch)
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6 * largest)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_agrees_within_its_rounding(precision):
    batch = padded([19, 12, 7, 3])
    expected = gradients(make_step("bert", packing=False), batch)
    found = gradients(make_step("bert", packing=True, precision=precision), batch)
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=3e-2 * largest)


@pytest.mark.parametrize(
    "batch", [padded([3, 9, 1, 9]), padded([5, 5]), padded([7]), padded([8, 4, 2], left=True)], ids=str
)
def test_any_order_equal_lengths_and_padding_on_the_left(batch):
    plain, packed = make_step("bert", packing=False), make_step("bert", packing=True)
    torch.testing.assert_close(
        packed.evaluate(batch)["logits"], plain.evaluate(batch)["logits"], rtol=0, atol=1e-6
    )


def test_dropout_is_used_and_follows_from_the_update():
    def loss(number: int) -> float:
        step = make_step("bert", packing=True)
        for module in step.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.3
        return step.update([padded([9, 5, 2])], number=number, learning_rate=0.0).loss

    assert loss(1) == loss(1) != loss(2)


def by_rows(query, key, value, layout, dropout, scaling, *, borders=None):
    """Attention of each row by itself: what the kernel with borders computes."""
    borders = layout.borders.tolist() if borders is None else borders
    parts = [
        F.scaled_dot_product_attention(*(part[:, :, start:stop] for part in (query, key, value)))
        for start, stop in itertools.pairwise(borders)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "size"), [(2, 8), (12, 32), (12, 64), (4, 128)])
def test_another_way_of_attention_is_right_by_its_answers_alone(dtype, heads, size):
    def judge(way) -> bool:
        return row_attention._is_right(way, CPU, dtype, heads, size)

    assert judge(by_rows)
    assert not judge(partial(by_rows, borders=[0, 5, 9]))  # the last two rows see each other
    assert not judge(partial(by_rows, borders=[0, 6, 8, 9]))
    assert not judge(lambda query, *more: by_rows(1.1 * query, *more))
    assert not judge(lambda *all_of: 1.1 * by_rows(*all_of))


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12), price=st.integers(0, 60))
def test_every_token_has_one_place(lengths, price):
    lengths = sorted(lengths, reverse=True)
    mask = padded(lengths)["attention_mask"]
    layout = Layout(mask, device=CPU, price_tokens=price)
    assert layout.positions.tolist() == np.flatnonzero(mask.numpy().reshape(-1)).tolist()
    assert sum(group.rows for group in layout.groups) == len(lengths)
    assert [group.start for group in layout.groups[1:]] == [group.stop for group in layout.groups[:-1]]
    assert layout.groups[-1].stop == sum(lengths)
    for group in layout.groups:
        if group.places is not None:
            count = torch.arange(group.stop - group.start)
            assert torch.equal(group.places[group.tokens], count)
            assert int(group.mask.sum()) == len(count)


def test_models_that_are_not_known_stay_padded():
    gpt = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40}
    task = make_step("bert", packing=False).task
    other = Task(**{**vars(task), "build_model": lambda: build("gpt2", **gpt)})
    step = Step(other, Choices(packing=True), Hyperparameters(), device=CPU)
    assert step.packing is None
    assert step.model.config._attn_implementation == "sdpa"


def test_a_model_that_answers_differently_without_padding_is_found():
    def build_odd() -> nn.Module:
        model = build("bert")
        layer = model.bert.encoder.layer[1]
        forward = layer.forward
        layer.forward = lambda hidden, *args, **kwargs: forward(
            hidden + hidden.roll(1, dims=1), *args, **kwargs
        )
        return model

    task = make_step("bert", packing=False).task
    with pytest.raises(ModelError, match="answers differently without padding"):
        Step(
            Task(**{**vars(task), "build_model": build_odd}),
            Choices(packing=True),
            Hyperparameters(),
            device=CPU,
        )


def test_what_is_saved_knows_nothing_of_it(tmp_path):
    step = make_step("bert", packing=True)
    step.model.save_pretrained(tmp_path)
    assert "snugtune" not in (tmp_path / "config.json").read_text()
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    batch = padded([6, 3])
    torch.testing.assert_close(logits(model, batch), step.evaluate(batch)["logits"], rtol=0, atol=1e-6)
