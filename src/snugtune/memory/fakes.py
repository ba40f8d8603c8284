"""Operations on fake tensors, with the shapes of results remembered, since layers repeat.

PyTorch's fake mode has a cache too; most of its time goes into finding out whether it may be used.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_Kind = Literal["new", "view", "in place", "other"]
_Shape = tuple[torch.Size, tuple[int, ...], int, torch.dtype, torch.device]
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Unknown(Exception):
    """An argument that says nothing about the result, or too much."""


class FakeOperations:
    """Runs operations on fake tensors.

    Args:
        mode: PyTorch's fake mode, which finds out shapes that are not known yet.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._shapes: dict[Any, tuple[type, list[_Shape]]] = {}

    def __call__(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of an operation."""
        kind = _kind(func)
        if kind == "other" or not args:
            return func(*args, **kwargs)
        if kind == "in place":
            if isinstance(args[0], FakeTensor):
                return args[0] if func._schema.returns else None
            return func(*args, **kwargs)
        try:
            key = (func, _key(args), _key(tuple(kwargs.items())))
        except _Unknown:
            return func(*args, **kwargs)
        known = self._shapes.get(key)
        if known is None:
            result = func(*args, **kwargs)
            if kind == "new" and _shares_storage(result, args):
                return result  # some operations return views without saying so
            if (found := _shapes(result, kind)) is not None:
                self._shapes[key] = found
            return result
        container, shapes = known
        base = args[0] if kind == "view" else None
        with in_kernel_invocation_manager(self._mode):
            bare = [self._bare(shape, base) for shape in shapes]
        made = [FakeTensor(self._mode, tensor, shape[4]) for tensor, shape in zip(bare, shapes, strict=True)]
        return made[0] if container is FakeTensor else container(made)

    @staticmethod
    def _bare(shape: _Shape, base: torch.Tensor | None) -> torch.Tensor:
        sizes, strides, offset, dtype, _ = shape
        if base is None:
            return torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
        empty = torch.empty(0, dtype=dtype, device="meta")
        return empty.set_(base.untyped_storage(), offset, sizes, strides)


@cache
def _kind(func: Any) -> _Kind:
    schema = func._schema
    returns = [value.alias_info for value in schema.returns]
    written = [
        argument for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write
    ]
    if torch.Tag.inplace_view in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        return "other"
    if written:
        in_place = schema.arguments[0] in written and func._schema.name.endswith("_")
        return "in place" if in_place and len(returns) <= 1 else "other"
    tensors = all("Tensor" in str(value.type) for value in schema.returns)
    if not tensors or not returns or func in _OTHER:
        return "other"
    if not any(returns):
        return "new"
    return "view" if len(returns) == 1 and str(schema.returns[0].type) == "Tensor" else "other"


_OTHER = {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default}


def _key(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        if value.dtype == torch.float64 and not value.dim():
            raise _Unknown  # a Python number in the guise of a tensor decides less about types than a tensor
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    raise _Unknown


def _shapes(result: Any, kind: _Kind) -> tuple[type, list[_Shape]] | None:
    results = result if isinstance(result, list | tuple) else [result]
    found: list[_Shape] = []
    for tensor in results:
        if not isinstance(tensor, FakeTensor) or tensor.layout != torch.strided:
            return None
        if kind == "new" and (tensor.storage_offset() or tensor.untyped_storage().nbytes() != extent(tensor)):
            return None
        found.append(
            (tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.fake_device)
        )
    return (FakeTensor if result is not results else type(result)), found


def _shares_storage(result: Any, args: Any) -> bool:
    def storages(values: Any) -> set[int]:
        parts = values if isinstance(values, list | tuple) else [values]
        return {part.untyped_storage()._cdata for part in parts if isinstance(part, FakeTensor)}

    return not storages(args).isdisjoint(storages(result))


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to its last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
