"""Fake tensors that know their values: integers, masks and small tensors, by which a model decides."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

_MOST_BYTES = 2**24  # of integers and masks: a mask of 4,096 by 4,096 positions
_MOST_FLOATS = 2**14  # rates, frequencies, labels; not what a layer computes

_aten = torch.ops.aten
_Fallback = Callable[..., Any]


def known_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value of a tensor as a real CPU tensor; None where it is not known."""
    if isinstance(tensor, FakeTensor):
        return getattr(tensor, "known_value", None)
    return tensor if _may_be_known(tensor) else None


def _may_be_known(tensor: torch.Tensor) -> bool:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.numel() <= _MOST_FLOATS
    return tensor.numel() * tensor.element_size() <= _MOST_BYTES


def run_with_values(
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
    *,
    run: Callable[[Any, Any, dict[str, Any]], Any],
    fakes: FakeTensorMode,
    assumed: dict[str, str],
) -> Any:
    """Run an operation on fake tensors, and on the values of those that have one.

    Args:
        func: The operation.
        args, kwargs: Its arguments.
        run: Runs it on fake tensors.
        fakes: Makes fake tensors of values.
        assumed: Receives what was answered where a value was asked for that is not known.
    """
    inputs = list(tensors_in(args))
    if kwargs:
        inputs += tensors_in(kwargs.values())
    known = all(known_value(tensor) is not None for tensor in inputs)
    if (depends := _DEPENDS_ON_VALUES.get(func)) is not None:
        value = _on_values(func, args, kwargs) if known else depends(func, args, assumed)
        return _fake_of(value, inputs[0].device, fakes) if isinstance(value, torch.Tensor | tuple) else value
    if func in _INDEXED_BY_MASKS:
        args = (args[0], _positions_of_masks(args[1], fakes, assumed), *args[2:])
    result = run(func, args, kwargs)
    if func is _aten.lift_fresh.default:
        result.constant = None  # else the fake mode computes with it on its own, and loses its device
    if not known:
        return result
    results = list(tensors_in((result,)))
    # A known tensor that is changed by an unknown one keeps the value it had: sums and counters start so.
    if (results or func._schema.is_mutable) and all(map(_may_be_known, results)):
        try:
            real = list(tensors_in((_on_values(func, args, kwargs),)))
        except RuntimeError:  # what only a card can do
            return result
        for fake, value in zip(results, real, strict=True):
            if isinstance(fake, FakeTensor):
                fake.known_value = value  # type: ignore[attr-defined]
    return result


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among values, also in lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def _on_values(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    args, kwargs = tree_map_only(torch.Tensor, known_value, (args, kwargs))
    with _disable_current_modes(), torch.no_grad():
        return func(*args, **kwargs)


def _fake_of(value: Any, device: torch.device, fakes: FakeTensorMode) -> Any:
    def fake(part: torch.Tensor) -> torch.Tensor:
        with fakes:
            made = torch.empty(part.shape, dtype=part.dtype, device=device)
        made.known_value = part  # type: ignore[attr-defined]
        return made

    return tree_map_only(torch.Tensor, fake, value)


def _positions_of_masks(indices: Any, fakes: FakeTensorMode, assumed: dict[str, str]) -> list[Any]:
    """Masks among indices become the positions where they are true, as every backend does it."""
    positions: list[Any] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            positions.append(index)
            continue
        value = known_value(index)
        with _disable_current_modes():
            if value is None:
                found = _every_position(_aten.nonzero.default, (index,), assumed)
            else:
                found = value.nonzero()
            columns = found.unbind(1)
        positions += [_fake_of(column, index.device, fakes) for column in columns]
    return positions


# What is answered where values are not known: the most that can come of it.


def _number(func: Any, args: Any, assumed: dict[str, str]) -> Any:
    dtype = args[0].dtype
    if dtype == torch.bool and _is_initialising():
        return False
    answer: Any = True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
    assumed[str(func)] = f"{answer} where a {str(dtype).removeprefix('torch.')} was read"
    return answer


def _is_initialising() -> bool:
    # Initialisers of PyTorch draw numbers again as long as one is out of
    # range, which would be for ever.
    frame = sys._getframe()
    while (above := frame.f_back) is not None:
        if above.f_code.co_filename == torch.nn.init.__file__:
            return True
        frame = above
    return False


def _truth(func: Any, args: Any, assumed: dict[str, str]) -> bool:
    assumed[str(func)] = "two tensors were taken for equal"
    return True


def _every_position(func: Any, args: Any, assumed: dict[str, str]) -> torch.Tensor:
    assumed[str(func)] = "every position of a mask counts"
    with _disable_current_modes():
        shape = args[0].shape
        grid = torch.arange(args[0].numel())
        columns = torch.unravel_index(grid, shape) if len(shape) else ()
        return torch.stack(columns, 1) if columns else torch.zeros(1, 0, dtype=torch.long)


def _every_element(func: Any, args: Any, assumed: dict[str, str]) -> torch.Tensor:
    assumed[str(func)] = "every position of a mask counts"
    with _disable_current_modes():
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
        return torch.zeros(shape.numel(), dtype=args[0].dtype)


def _all_different(func: Any, args: Any, assumed: dict[str, str]) -> tuple[torch.Tensor, ...]:
    assumed[str(func)] = "all elements of a tensor were taken for different ones"
    with _disable_current_modes():
        positions = torch.arange(args[0].numel())
        values = torch.zeros(args[0].numel(), dtype=args[0].dtype)
        return values, positions, torch.ones_like(positions)


_DEPENDS_ON_VALUES: dict[Any, _Fallback] = {
    _aten._local_scalar_dense.default: _number,
    _aten.equal.default: _truth,
    _aten.nonzero.default: _every_position,
    _aten.masked_select.default: _every_element,
    _aten._unique2.default: _all_different,
}
_INDEXED_BY_MASKS = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
}
