"""Traces of small models: births and deaths, values, and CUDA's choices."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from snugtune.memory.allocator import Allocator
from snugtune.memory.cuda import CudaCard, cuda_choices
from snugtune.memory.footprint import repeat, replay
from snugtune.memory.kernels import Kernels
from snugtune.memory.trace import CARD, Storage, Trace, place_on_card, tracing
from snugtune.units import MiB

CARD_90 = CudaCard(capability=(9, 0), multiprocessors=132, attention="memory-efficient")


def births(trace: Trace, begin: int = 0) -> list[int]:
    return [trace.storages[event].size_bytes for event in trace.events[begin:] if event >= 0]


def traced(function, card: CudaCard = CARD_90) -> list[tuple[str, int]]:
    """Operation and bytes of everything that a function allocates."""
    with cuda_choices(card), tracing(Kernels(card)) as tracer:
        function()
    return [(storage.op, storage.size_bytes) for storage in tracer.trace.storages]


def test_only_what_is_on_the_card_is_noted() -> None:
    with tracing() as tracer:
        host = torch.ones(1000)
        card = host.to(CARD)
        view = card[10:].reshape(-1, 10)
        assert tracer.number_of(view) == tracer.number_of(card) == 0
        assert tracer.number_of(host) is None
        del view, card
    assert tracer.trace.events == [0, ~0]


def test_host_and_card_do_not_mix() -> None:
    with tracing(), pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, 3) + torch.ones(3, 3, device=CARD)


def test_small_values_are_known_and_large_ones_assumed() -> None:
    with tracing() as tracer:
        mask = torch.tensor([True, False, True], device=CARD)
        rates = torch.linspace(0, 0.1, 3)
        assert mask.nonzero().shape == (2, 1)
        assert [rate.item() for rate in rates] == pytest.approx([0, 0.05, 0.1])
        assert torch.arange(12, device=CARD).reshape(3, 4)[mask].tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
        x = torch.randn(200, 200, device=CARD)
        assert x[x > 0].shape == (40000,)
        assert x.sum().item() == 1.0
    assert tracer.trace.assumed


def test_an_initialiser_that_draws_until_all_numbers_are_in_range_ends() -> None:
    with tracing() as tracer:
        weight = torch.empty(300, 300, device=CARD)
        assert torch.nn.init.trunc_normal_(weight, std=0.02) is weight
    assert not tracer.trace.assumed


def test_gradients_of_two_paths_are_added_in_place() -> None:
    def residual() -> None:
        x = torch.randn(64, 64, device=CARD, requires_grad=True)
        (F.layer_norm(x * 2, (64,)) + x.exp()).mul(3).backward(torch.ones(64, 64, device=CARD))

    assert "add_" not in dict(traced(residual))
    assert [op for op, _ in traced(residual)].count("add") == 1  # the one of the forward pass


@pytest.mark.parametrize(("training", "kept"), [(True, [1024, 4096]), (False, [])])
def test_dropout_keeps_a_mask_of_bytes(training: bool, kept: list[int]) -> None:
    def drop() -> None:
        x = torch.randn(1024, device=CARD)
        F.dropout(x, 0.1, training)

    assert [size for _, size in traced(drop)][1:] == kept


# What an H200 allocated for these, with PyTorch 2.11.
MEASURED = {
    "few sums": ((512, 768), lambda x: x.sum(0), [3072]),
    "sums": ((2048, 3072), lambda x: x.sum(0), [12288, 50331648, 96]),
    "many sums": ((32768, 1024), lambda x: x.sum(0), [4096, 138412032, 32]),
    "one sum": ((1024, 768), lambda x: x.sum(), [4, 384, 4]),
    "one sum of many": ((32768, 768), lambda x: x.sum(), [4, 2112, 4]),
    "two dimensions": ((8, 512, 768), lambda x: x.sum((0, 1)), [3072, 25165824, 24]),
    "norms": ((4_000_000,), lambda x: torch._foreach_norm((x,) * 5), [1240, 4, 4, 4, 4, 4]),
}


@pytest.mark.parametrize("name", MEASURED)
def test_reductions_need_the_buffers_that_were_measured(name: str) -> None:
    shape, function, expected = MEASURED[name]
    assert [size for _, size in traced(lambda: function(torch.randn(shape, device=CARD)))][1:] == expected


@pytest.mark.parametrize(
    ("rows", "tokens", "expected"),
    [
        (30522, 1024, [93763584]),
        (
            30522,
            4096,
            [
                32768,
                32768,
                32768,
                83455,
                93763584,
                32768,
                8,
                32768,
                1279,
                32768,
                32768,
                1279,
                8,
                36040,
                13839360,
            ],
        ),
    ],
)
def test_the_gradient_of_an_embedding_is_sorted_where_measured(rows, tokens, expected) -> None:
    with cuda_choices(CARD_90), tracing(Kernels(CARD_90)) as tracer:
        weight = torch.randn(rows, 768, device=CARD, requires_grad=True)
        out = F.embedding(torch.zeros(tokens, dtype=torch.long, device=CARD), weight)
        gradient = torch.ones_like(out)
        begin = len(tracer.trace.events)
        out.backward(gradient)
    assert births(tracer.trace, begin) == expected


# Batch, heads, tokens, width, type -> what the backward pass of memory-efficient attention allocated.
ATTENTION = [
    (2, 8, 512, 128, torch.float32, [4194304] * 4 + [32768, 32768, 4196352]),
    (2, 8, 300, 32, torch.float32, [614400] * 4 + [19200, 19200, 1312000]),
    (8, 12, 128, 64, torch.float16, [1572864] * 3 + [49152, 3148800]),
    (2, 8, 512, 128, torch.float16, [2097152] * 3 + [32768, 4195328]),
    (1, 4, 256, 256, torch.float16, [524288] * 3 + [4096, 3146240]),
    (2, 12, 512, 80, torch.float16, [1966080] * 3 + [49152, 6292992]),
]


@pytest.mark.parametrize(("batch", "heads", "tokens", "width", "dtype", "expected"), ATTENTION)
def test_attention_needs_the_workspace_that_was_measured(
    batch, heads, tokens, width, dtype, expected
) -> None:
    with cuda_choices(CARD_90), tracing(Kernels(CARD_90)) as tracer:
        q, k, v = (
            torch.randn(batch, tokens, heads, width, device=CARD, dtype=dtype, requires_grad=True)
            for _ in range(3)
        )
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), dropout_p=0.1)
        out = out.transpose(1, 2)
        gradient = torch.ones_like(out)
        begin = len(tracer.trace.events)
        out.backward(gradient)
    assert births(tracer.trace, begin) == expected


@pytest.mark.parametrize(
    ("attention", "capability", "operation"),
    [
        ("default", (9, 0), "_scaled_dot_product_cudnn_attention"),
        ("default", (8, 6), "_scaled_dot_product_flash_attention"),
        ("default", (6, 1), "_scaled_dot_product_efficient_attention"),
        ("memory-efficient", (9, 0), "_scaled_dot_product_efficient_attention"),
        ("math", (9, 0), "_safe_softmax"),
    ],
)
def test_the_card_decides_which_attention_runs(attention, capability, operation) -> None:
    card = CudaCard(capability=capability, multiprocessors=28, attention=attention)

    def attend() -> None:
        q = torch.randn(2, 4, 64, 32, device=CARD, dtype=torch.float16, requires_grad=True)
        F.scaled_dot_product_attention(q, q, q)

    assert operation in dict(traced(attend, card))


@pytest.mark.parametrize(
    ("permuted", "operation"),
    [(False, "_scaled_dot_product_efficient_attention"), (True, "_safe_softmax")],
)
def test_a_mask_that_is_not_in_rows_is_left_to_the_math_kernel(permuted: bool, operation: str) -> None:
    def attend() -> None:
        q = torch.randn(2, 4, 64, 32, device=CARD, requires_grad=True)
        bias = torch.randn(64, 64, 4, device=CARD).permute(2, 0, 1).unsqueeze(0)
        F.scaled_dot_product_attention(q, q, q, attn_mask=bias if permuted else bias.contiguous())

    assert operation in dict(traced(attend))


def test_autocast_follows_the_lists_of_cuda() -> None:
    card = CARD_90
    with cuda_choices(card), tracing(Kernels(card)), torch.autocast("cpu", dtype=torch.float16):
        x = torch.randn(8, 16, device=CARD)
        y = F.linear(x, torch.randn(4, 16, device=CARD))
        assert y.dtype == torch.float16
        assert torch.softmax(y, -1).dtype == torch.float32
        assert F.layer_norm(y, (4,)).dtype == torch.float32
        assert y.sum().dtype == y.exp().dtype == y.pow(2).dtype == torch.float32
        assert (y + y).dtype == F.gelu(y).dtype == torch.float16
        assert F.cross_entropy(y, torch.zeros(8, dtype=torch.long, device=CARD)).dtype == torch.float32


def test_tensors_of_other_code_are_left_alone() -> None:
    x = torch.randn(8, 16)
    torch.manual_seed(0)
    expected = F.dropout(x, 0.5)
    with cuda_choices(CARD_90):
        torch.manual_seed(0)
        assert torch.equal(F.dropout(x, 0.5), expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.softmax(F.linear(x, x), -1).dtype == torch.bfloat16
    assert F.softmax(x.half(), -1).dtype == torch.float16


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_keep_what_cudnn_keeps(kind: type[nn.RNNBase]) -> None:
    """Reserves of one and of three layers, as measured."""
    measured = {nn.LSTM: (41943296, 181709056), nn.GRU: (50331904, 213657856), nn.RNN: (8388864, 53913856)}
    for settings, expected in zip(((512, 1, 0.0), (650, 3, 0.5)), measured[kind], strict=True):
        hidden, layers, dropout = settings

        def run(hidden=hidden, layers=layers, dropout=dropout) -> None:
            net = place_on_card(kind(300, hidden, layers, batch_first=True, dropout=dropout))
            out, _ = net(torch.randn(32, 128, 300, device=CARD))
            out.sum().backward()

        assert expected in [size for _, size in traced(run)]


def train(model: nn.Module, width: int, tracer, updates: int) -> None:
    with tracer.phase("load"):
        place_on_card(model)
        tracer.watch(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    loss = None
    for number in range(1, updates + 1):
        with tracer.phase(f"update {number}"):
            loss = model(torch.randn(64, width, device=CARD)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    with tracer.phase("evaluation"), torch.no_grad():
        model(torch.randn(512, width, device=CARD))


def test_a_repeated_update_equals_one_that_was_traced() -> None:
    peaks = []
    for updates in (3, 6):
        with cuda_choices(CARD_90), tracing(Kernels(CARD_90)) as tracer:
            train(nn.Sequential(nn.Linear(300, 500), nn.ReLU(), nn.Linear(500, 9)), 300, tracer, updates)
        trace = repeat(tracer.trace, "update 3", "update 2", 6 - updates)
        allocator = Allocator()
        found = replay(trace, allocator)
        training = [peak for name, peak in found.items() if name.startswith("update")]
        reserved = max(peak.reserved_bytes for peak in training)
        peaks.append((found["evaluation"].allocated_bytes, reserved, len(trace.events)))
    assert peaks[0] == peaks[1]


def test_what_only_a_repetition_takes_counts_as_training() -> None:
    # Two equal updates: the later leaves what the earlier had, until it has its own.
    storages = [Storage(30 * MiB, "op", "", "update") for _ in range(2)]
    trace = Trace(storages=storages, events=[0, 1, ~0], spans={"update 1": (0, 1), "update 2": (1, 3)})
    found = replay(repeat(trace, "update 2", "update 1", 2), Allocator())
    assert found["update 2, again"].reserved_bytes == 60 * MiB
    assert set(found) == {"", "update 1", "update 2", "update 2, again"}


def test_storages_know_their_module_in_both_passes() -> None:
    with tracing() as tracer:
        model = nn.Sequential(nn.Linear(30, 50), nn.Sequential(nn.Linear(50, 9)))
        train(model, 30, tracer, 1)
    modules = {storage.module for storage in tracer.trace.storages if storage.backward}
    assert {"0", "1.0"} <= modules


def test_a_filter_that_leaves_out_points_writes_its_output_as_it_has_to_be() -> None:
    # Measured on an H200: conv2d 64 256 512 56 1 2 0 1.
    def convolve() -> None:
        with torch.no_grad():
            x = torch.randn(64, 256, 56, 56, device=CARD)
            F.conv2d(x, torch.randn(512, 256, 1, 1, device=CARD), stride=2)

    assert [size for op, size in traced(convolve) if op == "convolution"] == [102760448, 206045200]
