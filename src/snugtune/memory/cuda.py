"""What CUDA does differently from a CPU: its operators, run on fake CPU tensors in any build of PyTorch.

Most operators are the same everywhere. Some are put together differently on each device (attention,
dropout, softmax in half precision), and autocast has lists of its own. While `cuda_choices` is active,
fake tensors get CUDA's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from snugtune.memory.autocast import autocast_operations
from snugtune.memory.overriding import composite, for_fakes, overload
from snugtune.memory.recurrent import recurrent_operations

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class CudaCard:
    """What PyTorch's choices depend on.

    Args:
        capability: Compute capability.
        multiprocessors: Multiprocessors of the card.
        attention: "default" as PyTorch chooses; "memory-efficient" with flash and cuDNN kernels switched off;
            "math" with those off too.
    """

    capability: tuple[int, int]
    multiprocessors: int
    attention: Literal["default", "memory-efficient", "math"] = "default"

    @property
    def threads_per_multiprocessor(self) -> int:
        """CUDA C++ Programming Guide, technical specifications per compute capability."""
        return {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}.get(
            self.capability, 2048
        )


@contextmanager
def cuda_choices(card: CudaCard) -> Iterator[None]:
    """Fake CPU tensors take CUDA's ways inside; other tensors are left alone."""
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is overridden
        for key, operations in (("AutogradCPU", _composed(card)), ("AutocastCPU", autocast_operations())):
            library = torch.library.Library("aten", "IMPL", key)  # type: ignore[no-untyped-call]
            stack.callback(library._destroy)
            for name, function in operations:
                library.impl(name, function)  # type: ignore[no-untyped-call]
        _pretend(stack)
        yield


def _pretend(stack: ExitStack) -> None:
    """Code that asks what kind of tensor it has: fake ones are like any other of a card."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    stack.enter_context(mock.patch.object(optimizer, "_get_foreach_kernels_supported_devices", _supported))
    for module in (optimizer, _foreach_utils):
        kinds = module._foreach_supported_types
        if FakeTensor not in kinds:
            kinds.append(FakeTensor)
            stack.callback(kinds.remove, FakeTensor)
    # These write on the host and copy; where no other kind of device is asked for, they leave the copy out.
    for place, name in (
        (torch, "tensor"),
        (torch, "as_tensor"),
        (torch, "asarray"),
        (torch.Tensor, "new_tensor"),
    ):
        stack.enter_context(mock.patch.object(place, name, _copied_where_asked(getattr(place, name))))
    try:
        from transformers.utils import import_utils
    except ImportError:
        return
    # Tensors with known values take the ways of real ones; a trace for export would not look at masks.
    stack.enter_context(mock.patch.object(import_utils, "is_fake_tensor", _is_none, create=True))


def _supported() -> list[str]:
    return ["cpu"]


def _is_none(_: Any) -> bool:
    return False


def _copied_where_asked(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None and make.__name__ == "new_tensor":
            device = args[0].device
        tensor = make(*args, **kwargs)
        return tensor if device is None or tensor.device == torch.device(device) else tensor.to(device)

    return made


def _composed(card: CudaCard) -> Iterator[tuple[str, Callable[..., Any]]]:
    functions: dict[str, Callable[..., Any]] = {
        "dropout": _dropout,
        "softmax.int": _softmax(_aten._softmax.default),
        "log_softmax.int": _softmax(_aten._log_softmax.default),
        "scaled_dot_product_attention": _Attention(card),
        **recurrent_operations(_autocast_type),
    }
    for name, function in functions.items():
        yield name, for_fakes(function, composite(overload(name)))


def _autocast_type() -> torch.dtype | None:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> Any:
    # aten/src/ATen/native/Dropout.cpp, is_fused_kernel_acceptable: one kernel, with a mask of bytes.
    if not train or p == 0 or not tensor.numel():
        return tensor
    if p >= 1:
        return NotImplemented
    return _aten.native_dropout.default(tensor, p, train)[0]


def _softmax(kernel: Any) -> Callable[..., Any]:
    def softmax(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        # aten/src/ATen/native/SoftMax.cpp: CUDA reads fp16 and writes fp32 without a copy in between.
        if tensor.dtype != torch.float16 or dtype != torch.float32:
            return NotImplemented
        return kernel(tensor, dim, True)

    return softmax


class _Attention:
    """The choice of native/transformers/cuda/sdp_utils.cpp, and what attention.cpp does then."""

    def __init__(self, card: CudaCard) -> None:
        self.card = card

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if query.dim() == 4 and query.layout == torch.strided:
            if self._may_cudnn(query, key, value):
                needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
                mask = None if attn_mask is None else self._prepare_mask(attn_mask, query, key)
                return _aten._scaled_dot_product_cudnn_attention.default(
                    query, key, value, mask, needs_grad, dropout_p, is_causal, False, scale=scale
                )[0]
            if self._may_flash(query, key, value, attn_mask, is_causal):
                return self._flash(query, key, value, dropout_p, is_causal, scale)
            if self._may_be_efficient(query, key, value, attn_mask):
                mask = self._prepare_mask(attn_mask, query, key)
                needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
                return _aten._scaled_dot_product_efficient_attention.default(
                    query, key, value, mask, needs_grad, dropout_p, is_causal, scale=scale
                )[0]
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = _additive(attn_mask, query.dtype)
        return _aten._scaled_dot_product_attention_math.default(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]

    def _may_cudnn(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
        # check_prefer_cudnn_attention: on Hopper and data-centre Blackwell it comes first.
        return (
            self.card.attention == "default"
            and self.card.capability[0] in (9, 10)
            and query.dtype in _HALF
            and query.shape[:2] == key.shape[:2] == value.shape[:2]
            and all(tensor.shape[-1] % 8 == 0 and tensor.shape[-1] <= 256 for tensor in (query, value))
            and query.shape[-2] > 1
        )

    def _may_flash(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
    ) -> bool:
        width = query.shape[-1]
        return (
            self.card.attention == "default"
            and self.card.capability >= (8, 0)
            and query.dtype in _HALF
            and mask is None
            and width == key.shape[-1] == value.shape[-1] <= 256
            and (not causal or query.shape[-2] == key.shape[-2])
            and all(tensor.stride(-1) == 1 for tensor in (query, key, value))
        )

    @staticmethod
    def _flash(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        width = query.shape[-1]
        if width % 8:
            scale = width**-0.5 if scale is None else scale
            query, key, value = (
                torch.nn.functional.pad(tensor, (0, 8 - width % 8)) for tensor in (query, key, value)
            )
        flash = _aten._scaled_dot_product_flash_attention.default
        out: torch.Tensor = flash(query, key, value, dropout_p, causal, False, scale=scale)[0]
        return out[..., :width] if width % 8 else out

    def _may_be_efficient(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> bool:
        major = self.card.capability[0]
        half = query.dtype in _HALF
        alignment = 4 if major >= 8 else 1  # minimum_gemm_alignment
        if major >= 8 or (major >= 7 and half):
            alignment = max(alignment, 8 if half else 4)
        return (
            self.card.attention != "math"
            and (query.dtype in (torch.float32, torch.float16) or (half and major >= 8))
            and query.dtype == key.dtype == value.dtype
            and query.shape[:2] == key.shape[:2] == value.shape[:2]  # no groups of queries share a key
            and query.shape[-1] % alignment == 0 == value.shape[-1] % alignment
            and all(tensor.stride(-1) == 1 and tensor.shape[-2] for tensor in (query, key, value))
            and (mask is None or mask.stride(-1) == 1)  # check_last_dim_stride_equals_1_dense
        )

    @staticmethod
    def _prepare_mask(
        mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor | None:
        if mask is None:
            return None
        if mask.dtype == torch.bool:
            mask = _additive(mask, query.dtype)
        rest = mask.shape[-1] % 16
        if rest:  # pad_bias: rows begin at whole 16 elements
            mask = torch.nn.functional.pad(mask, (0, 16 - rest))[..., : key.shape[-2]]
        return mask.expand(*query.shape[:-1], key.shape[-2])


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask of booleans as numbers to add, as `convert_boolean_attn_mask` does it."""
    numbers = torch.zeros_like(mask, dtype=dtype)
    return numbers.masked_fill_(mask.logical_not(), -torch.inf)
