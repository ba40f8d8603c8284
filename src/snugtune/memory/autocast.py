"""CUDA's autocast for fake CPU tensors, by the lists of aten/src/ATen/autocast_mode.h.

Its list for half precision is nearly that of the CPU; those for fp32 are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from snugtune.memory.overriding import composite, for_fakes, overload

_HALF = (torch.float16, torch.bfloat16)


def autocast_operations() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Names of operations, and what autocast does with them on CUDA."""
    for name in (*_IN_FP32, *_TO_FP32):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
            operation = overload(name)
            cast = _to_fp32 if name in _TO_FP32 else _in_fp32
            yield name, for_fakes(cast(operation), _without_autocast(operation))
    # The CPU's list has it for fp32; CUDA only has the parts that it is put together from.
    whole = overload("cross_entropy_loss")
    yield "cross_entropy_loss", for_fakes(composite(whole), _in_fp32(whole))


_BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def _without_autocast(operation: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_BELOW):
            return operation(*args, **kwargs)

    return run


def _cast(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.float() if argument.dtype in _HALF else argument
    if isinstance(argument, list | tuple):
        return type(argument)(map(_cast, argument))
    return argument


def _in_fp32(operation: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_BELOW):
            return operation(*map(_cast, args), **{key: _cast(value) for key, value in kwargs.items()})

    return run


def _to_fp32(operation: Any) -> Callable[..., Any]:
    names = [argument.name for argument in operation._schema.arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_BELOW):
            if args[0].dtype in (*_HALF, torch.float32):
                given = dict(zip(names, args, strict=False)) | kwargs
                if given.get("dtype") is None:
                    return operation(*args[: names.index("dtype")], **{**kwargs, "dtype": torch.float32})
            return operation(*args, **kwargs)

    return run


# AT_FORALL_FP32: the inputs become fp32.
_IN_FP32 = (
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "group_norm",
    "frobenius_norm.dim",
    "nuclear_norm",
    "nuclear_norm.dim",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "upsample_nearest1d",
    "_upsample_nearest_exact1d",
    "upsample_nearest2d",
    "_upsample_nearest_exact2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "_upsample_bilinear2d_aa",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
)
# AT_FORALL_FP32_SET_OPT_DTYPE: the result is fp32, unless another type was asked for.
_TO_FP32 = (
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
    "sum",
    "sum.dim_IntList",
)
