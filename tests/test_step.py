"""The step: the gradient of an update is that of its whole batch, in whatever passes it is computed."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from snugtune.errors import ModelError
from snugtune.step import Choices, Hyperparameters, Step
from snugtune.tasks import Task

CPU = torch.device("cpu")
LABELS = {
    "single": lambda rows: torch.arange(rows) % 3,
    "weighted": lambda rows: torch.arange(rows) % 3,
    "multi": lambda rows: (torch.arange(rows * 3).reshape(rows, 3) % 2).float(),
    "number": lambda rows: torch.linspace(-1, 1, rows),
    "tokens": lambda rows: torch.arange(rows) % 3,
}
WEIGHTS = torch.tensor([0.2, 1.0, 7.0])


class Net(nn.Module):
    """Four like blocks with dropout, so that checkpointing and random numbers have something to do."""

    def __init__(self, classes: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Dropout(dropout))
            for _ in range(4)
        )
        self.last = nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def make_task(kind: str, dropout: float = 0.0) -> Task:
    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | float]:
        answers, labels = model(batch["x"]).float(), batch["labels"]
        if kind == "multi":
            return F.binary_cross_entropy_with_logits(answers, labels, reduction="sum"), labels.numel()
        if kind == "number":
            return F.mse_loss(answers.squeeze(-1), labels, reduction="sum"), len(labels)
        if kind == "weighted":
            return F.cross_entropy(answers, labels, WEIGHTS, reduction="sum"), WEIGHTS[labels].sum()
        if (
            kind == "tokens"
        ):  # rows count only when their first feature is positive, as tokens with a label do
            counted = torch.where(batch["x"][:, 0] > 0, labels, -100)
            return F.cross_entropy(answers, counted, reduction="sum"), (counted != -100).sum()
        return F.cross_entropy(answers, labels, reduction="sum"), len(labels)

    return Task(
        name=kind,
        build_model=lambda: Net(1 if kind == "number" else 3, dropout),
        collate=lambda rows: {},
        loss=loss,
        outputs=lambda model, batch: {"answers": model(batch["x"])},
        measure=lambda outputs: {},
        example_batch=lambda rows, tokens: {},
        metric="loss",
        save=lambda model, folder: None,
    )


def make_batch(kind: str, rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {"x": torch.randn(rows, 8, generator=generator), "labels": LABELS[kind](rows)}


def cut(batch: dict[str, torch.Tensor], sizes: list[int]) -> list[dict[str, torch.Tensor]]:
    parts = {name: value.split(sizes) for name, value in batch.items()}
    return [{name: values[i] for name, values in parts.items()} for i in range(len(sizes))]


def make_step(task: Task, *, choices: Choices | None = None, **hyper: object) -> Step:
    hyperparameters = Hyperparameters(**{"learning_rate": 0.1, "clip_grad_norm": None, **hyper})  # type: ignore[arg-type]
    return Step(task, choices or Choices(optimizer="sgd"), hyperparameters, device=CPU)


def weights(step: Step) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in step.model.parameters()]


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("sizes", [[12], [5, 4, 3], [1, 11], [1] * 12], ids=str)
@pytest.mark.parametrize("checkpointed", [0, 2, "all"])
def test_an_update_in_passes_is_the_update_of_the_whole_batch(kind, sizes, checkpointed):
    task, batch = make_task(kind), make_batch(kind, 12)
    step = make_step(task, choices=Choices(optimizer="sgd", checkpointed_layers=checkpointed))
    reference = copy.deepcopy(make_step(task).model)
    loss_sum, denominator = task.loss(reference, batch)
    (loss_sum / denominator).backward()

    did = step.update(cut(batch, sizes), number=0, learning_rate=1.0)

    assert did.applied
    assert did.samples == 12
    assert did.loss == pytest.approx(float(loss_sum.detach() / denominator), rel=1e-6)
    for before, after in zip(reference.parameters(), step.model.parameters(), strict=True):
        decay = 0.01 * before.detach() if before.ndim > 1 else 0
        expected = before.detach() - (before.grad + decay)  # SGD: its first momentum is the gradient itself
        torch.testing.assert_close(after.detach(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_passes_agree_in_half_precision_within_its_rounding(precision):
    task, batch = make_task("weighted"), make_batch("weighted", 12)
    choices = Choices(optimizer="sgd", precision=precision)
    one, many = make_step(task, choices=choices), make_step(task, choices=choices)
    for step in (one, many):  # at the first scale, 2^16, the sum over the whole batch overflows
        if precision == "fp16":
            step.scaler.load_state_dict({**step.scaler.state_dict(), "scale": 2.0**8})
    assert one.update([batch], number=0, learning_rate=1.0).applied
    assert many.update(cut(batch, [7, 3, 2]), number=0, learning_rate=1.0).applied
    assert {parameter.dtype for parameter in many.model.parameters()} == {torch.float32}
    for a, b in zip(weights(one), weights(many), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=3e-2)


def test_clipping_limits_the_gradient_of_the_batch_and_not_of_a_pass():
    task, batch = make_task("single"), make_batch("single", 12)
    for sizes in ([12], [1] * 12):
        step = make_step(task, clip_grad_norm=1e-3, weight_decay=0.0)
        before = weights(step)
        did = step.update(cut(batch, sizes), number=0, learning_rate=1.0)
        moved = math.sqrt(
            sum(float(((a - b) ** 2).sum()) for a, b in zip(before, weights(step), strict=True))
        )
        assert did.grad_norm > 1e-2
        assert moved == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("scale", [2.0**16, 2.0**4])
def test_clipping_sees_the_gradient_without_the_loss_scale(scale):
    """C050: clipped before it is unscaled, the model would hardly learn."""
    task, batch = make_task("single"), make_batch("single", 12)
    step = make_step(
        task, choices=Choices(optimizer="sgd", precision="fp16"), clip_grad_norm=1e-3, weight_decay=0.0
    )
    step.scaler.load_state_dict({**step.scaler.state_dict(), "scale": scale})
    before = weights(step)
    did = step.update([batch], number=0, learning_rate=1.0)
    moved = math.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in zip(before, weights(step), strict=True)))
    assert did.loss_scale == scale
    assert moved == pytest.approx(1e-3, rel=1e-3)


def test_a_gradient_that_is_not_finite_is_never_applied_and_halves_the_loss_scale():
    task, batch = make_task("single"), make_batch("single", 12)
    step = make_step(task, choices=Choices(optimizer="sgd", precision="fp16"))
    before = weights(step)
    batch["x"][3, 2] = math.inf
    did = step.update([batch], number=0, learning_rate=1.0)
    assert not did.applied
    assert not math.isfinite(did.grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(step), strict=True))
    assert all(parameter.grad is None for parameter in step.model.parameters())
    assert step.scaler.state_dict()["scale"] == did.loss_scale / 2


def test_dropout_follows_from_seed_update_and_pass_alone():
    task, batch = make_task("single", dropout=0.5), make_batch("single", 12)
    losses = {}
    for name, number, seed, noise in [("a", 3, 1, 0), ("b", 3, 1, 99), ("c", 4, 1, 0), ("d", 3, 2, 0)]:
        step = make_step(task, seed=seed)
        step.model.load_state_dict(make_step(task, seed=1).model.state_dict())
        torch.manual_seed(noise)
        losses[name] = step.update(cut(batch, [6, 6]), number=number, learning_rate=0.1).loss
    assert losses["a"] == losses["b"]
    assert len({losses["a"], losses["c"], losses["d"]}) == 3


def test_checkpointed_layers_repeat_their_dropout_in_the_backward_pass():
    task, batch = make_task("single", dropout=0.5), make_batch("single", 12)
    plain = make_step(task)
    recomputed = make_step(task, choices=Choices(optimizer="sgd", checkpointed_layers="all"))
    assert recomputed.checkpointed == 4
    for step in (plain, recomputed):
        step.update([batch], number=0, learning_rate=1.0)
    for a, b in zip(weights(plain), weights(recomputed), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_the_random_numbers_of_the_caller_are_left_alone():
    task, batch = make_task("single", dropout=0.5), make_batch("single", 12)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make_step(task).update([batch], number=0, learning_rate=0.1)
    assert torch.equal(torch.rand(3), expected)


def test_new_weights_follow_from_the_seed():
    task = make_task("single")
    one, same, other = make_step(task, seed=1), make_step(task, seed=1), make_step(task, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(same), strict=True))
    assert not torch.equal(weights(one)[0], weights(other)[0])


@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-foreach", "sgd", "adafactor"])
def test_every_optimizer_learns_and_leaves_norms_and_biases_without_decay(optimizer):
    task, batch = make_task("single"), make_batch("single", 12)
    step = make_step(task, choices=Choices(optimizer=optimizer))
    losses = [step.update([batch], number=n, learning_rate=0.01).loss for n in range(40)]
    assert losses[-1] < 0.8 * losses[0]
    decays = {p.ndim > 1: g["weight_decay"] for g in step.optimizer.param_groups for p in g["params"]}
    assert decays == {True: 0.01, False: 0.0}


def test_evaluation_keeps_no_graph_and_switches_dropout_off():
    task, batch = make_task("single", dropout=0.5), make_batch("single", 12)
    step = make_step(task)
    first, second = step.evaluate(batch)["answers"], step.evaluate(batch)["answers"]
    assert torch.equal(first, second)
    assert not first.requires_grad
    assert step.update([batch], number=0, learning_rate=0.1).applied
    assert step.model.training


def test_half_precision_parameters_that_learn_become_fp32_and_frozen_ones_stay():
    task = make_task("single")

    def build() -> nn.Module:
        model = Net(3, 0.0).half()
        model.first.weight.requires_grad_(False)
        return model

    half = Task(**{**vars(task), "build_model": build})
    step = make_step(half, choices=Choices(optimizer="sgd", precision="fp16"))
    kinds = {name: parameter.dtype for name, parameter in step.model.named_parameters()}
    assert kinds.pop("first.weight") == torch.float16
    assert set(kinds.values()) == {torch.float32}
    assert step.update([make_batch("single", 12)], number=0, learning_rate=0.1).applied


def test_a_model_in_which_nothing_learns_is_refused():
    task = Task(**{**vars(make_task("single")), "build_model": lambda: Net(3, 0.0).requires_grad_(False)})
    with pytest.raises(ModelError, match="no parameter of the model can learn"):
        make_step(task)


@pytest.mark.parametrize(("optimizer", "reads"), [("adamw-fused", 1), ("sgd", 2)])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_every_number_that_a_choice_depends_on_goes_through_the_reader(optimizer, reads, precision):
    """Fake tensors have no values, so nothing else may ask for one; and each look waits for the device."""
    task, batch = make_task("tokens"), make_batch("tokens", 12)
    read = []
    step = make_step(task, choices=Choices(optimizer=optimizer, precision=precision))
    step.read = lambda values: read.append(values) or [1.0] * values.numel()  # type: ignore[func-returns-value]
    real = torch.Tensor.item

    def refuse(self: torch.Tensor) -> float:
        raise AssertionError("a value was read past the reader")

    torch.Tensor.item = refuse  # type: ignore[method-assign]
    try:
        step.update(cut(batch, [6, 6]), number=0, learning_rate=0.1)
    finally:
        torch.Tensor.item = real  # type: ignore[method-assign]
    assert len(read) == reads


def test_layers_in_which_samples_see_each_other_are_named():
    task = make_task("single")
    assert make_step(task).interacting == []
    normed = Task(**{**vars(task), "build_model": lambda: nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3))})
    assert make_step(normed).interacting == ["BatchNorm1d"]


def test_models_in_double_precision_learn():
    task = make_task("single")
    double = Task(**{**vars(task), "build_model": lambda: Net(3, 0.0).double(), "loss": double_loss})
    step = make_step(double, choices=Choices())
    before = weights(step)
    assert step.update([make_batch("single", 12)], number=0, learning_rate=0.1).applied
    assert weights(step)[0].dtype == torch.float64
    assert not torch.equal(before[0], weights(step)[0])


def double_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(model(batch["x"].double()), batch["labels"], reduction="sum"), len(batch["labels"])


def test_frozen_halves_and_half_statistics_become_fp32_where_nothing_brings_them_together():
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).half()
        model[0].requires_grad_(False)
        return model

    half = Task(**{**vars(make_task("single")), "build_model": build})
    step = make_step(half)
    assert {tensor.dtype for tensor in [*step.model.parameters(), *step.model.buffers()]} == {
        torch.float32,
        torch.int64,
    }
    assert step.update([make_batch("single", 12)], number=0, learning_rate=0.1).applied


def test_a_single_row_for_batchnorm_is_explained():
    normed = Task(
        **{
            **vars(make_task("single")),
            "build_model": lambda: nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3)),
        }
    )
    with pytest.raises(ModelError, match="BatchNorm got a pass of 1 row"):
        make_step(normed).update([make_batch("single", 1)], number=0, learning_rate=0.1)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_loss_that_reaches_no_parameter_is_refused(precision):
    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return torch.ones((), requires_grad=True) * 2, 12

    cut_off = Task(**{**vars(make_task("single")), "loss": loss})
    with pytest.raises(ModelError, match="does not depend on any parameter"):
        make_step(cut_off, choices=Choices(precision=precision)).update(
            [make_batch("single", 12)], number=0, learning_rate=0.1
        )


def test_only_masks_of_tokens_are_counted():
    task = make_task("single")
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    for given, tokens, padding in [(mask, 3, 0.5), (mask.bool(), 3, 0.5), (mask.float(), None, None)]:
        batch = {**make_batch("single", 2), "attention_mask": given}
        did = make_step(task).update([batch], number=0, learning_rate=0.1)
        assert (did.tokens, did.padding) == (tokens, padding)
