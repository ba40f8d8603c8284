"""What a callable allocates on a card: its storages, from birth to death, found out with fake tensors.

Fake tensors have shapes but no data. Those of the card are fake tensors of the device `cpu:0`, those of
the host of the device `cpu`: PyTorch keeps the two apart by the rules that hold for `cuda:0` and `cpu`,
and needs no CUDA for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from snugtune.memory.fakes import FakeOperations, extent
from snugtune.memory.scratch import Lasting, Need, OnHost, Result
from snugtune.memory.values import run_with_values, tensors_in

_ADD = torch.ops.aten.add.Tensor
_DEVICE_OF = torch.ops.prim.device.default
CARD = torch.device("cpu", 0)
Scratch = Callable[[Any, Any, dict[str, Any], Any], "Iterator[Need] | None"]


@dataclass(slots=True)
class Storage:
    """A stretch of memory that a tensor, or several views, lie in.

    Args:
        size_bytes: Bytes asked for, not rounded.
        op: The operation that made it.
        module: Path of the module that was at work; in the backward pass, that of the forward operation.
        phase: What the callable was doing, as it said by `Tracer.phase`.
        backward: Whether the backward pass, or what comes after it, made it.
        workspace: Whether a library needs it beside the tensors.
    """

    size_bytes: int
    op: str
    module: str
    phase: str
    backward: bool = False
    workspace: bool = False


@dataclass
class Trace:
    """Storages, and births and deaths in their order.

    Args:
        storages: Every storage, numbered from 0 in order of birth.
        events: n for the birth of storage n, ~n for its death.
        spans: Name of each phase, with its first event and the one after its last.
        assumed: Values that were read from tensors without data, and what was answered.
    """

    storages: list[Storage] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    assumed: dict[str, str] = field(default_factory=dict)


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storages of the card. Used by `tracing`."""

    def __init__(self, scratch: Scratch | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._run = FakeOperations(self.fakes)
        self._scratch = scratch
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._lasting: set[str] = set()
        self._phase, self._op = "", ""
        self._alone: tuple[int, int] | None = (-1, -1)
        self._modules: list[str] = []
        self._module_of: dict[int, str] = {}  # sequence number of a forward operation -> module
        self._names: dict[int, str] = {}  # id of a module -> path

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Storages that are born inside belong to this phase."""
        before, self._phase = self._phase, name
        begin = len(self.trace.events)
        try:
            yield
        finally:
            self._phase = before
            self.trace.spans[name] = (begin, len(self.trace.events))

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Number of the storage that a tensor lies in; None where it is not on the card."""
        entry = self._alive.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on fake tensors, and note what it allocates."""
        if func is _DEVICE_OF:  # asked for more often than anything is computed
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        kwargs = kwargs or {}
        self._op = func._schema.name.removeprefix("aten::")
        if func is _ADD and self._adds_in_place(args):
            return args[0]
        result = run_with_values(
            func, args, kwargs, run=self._run, fakes=self.fakes, assumed=self.trace.assumed
        )
        needs = self._scratch(func, args, kwargs, result) if self._scratch is not None else None
        if needs is None:
            for tensor in tensors_in((result,)):
                self._note(tensor)
        else:
            self._note_needs(needs, _results(result))
        return result

    def _adds_in_place(self, args: Any) -> bool:
        """Whether the backward pass adds a gradient to another one that nothing else refers to.

        torch/csrc/autograd/input_buffer.cpp does it in place, but not for subclasses, as fakes are.
        """
        first, second = args[0], args[1]
        if torch._C._current_autograd_node() is None or torch.is_grad_enabled():
            return False
        if not isinstance(first, FakeTensor) or not isinstance(second, FakeTensor):
            return False
        storage = first.untyped_storage()
        references = (cast(Any, first)._use_count(), torch._C._storage_Use_Count(storage._cdata))
        if self._alone is None:
            self._alone = references
        return (
            references == self._alone
            and first.shape == second.shape
            and first.dtype == second.dtype
            and extent(first) == first.numel() * first.element_size()  # neither gaps nor overlaps
        )

    def calibrate(self) -> None:
        """Find out how many references there are to a gradient that only the backward pass knows."""
        self._alone = None
        x = torch.ones(2, device=CARD, requires_grad=True)
        torch.autograd.backward((x * 2).exp() + (x * 3).exp(), torch.ones(2, device=CARD))
        del x
        self.trace = Trace()

    def _note(self, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, FakeTensor) or tensor.fake_device != CARD:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or not storage.nbytes():
            return
        number = self._born(storage.nbytes())
        self._alive[key] = (number, weakref.ref(storage, lambda _: self._died(key)))

    def _born(self, size_bytes: int, *, workspace: bool = False) -> int:
        number = len(self.trace.storages)
        late = torch._C._current_autograd_node() is not None and not torch.is_grad_enabled()
        self.trace.storages.append(
            Storage(size_bytes, self._op, self._module(), self._phase, late, workspace)
        )
        self.trace.events.append(number)
        return number

    def _died(self, key: int) -> None:
        number, _ = self._alive.pop(key)
        self.trace.events.append(~number)

    def _note_needs(self, needs: Iterator[Need], results: list[torch.Tensor | None]) -> None:
        born: list[int] = []
        for need in needs:
            if isinstance(need, Result):
                if (tensor := results[need.number]) is not None:
                    self._note(tensor)
                results[need.number] = None
            elif isinstance(need, OnHost):
                results[need.number] = None
            elif isinstance(need, Lasting):
                if need.name not in self._lasting:
                    self._lasting.add(need.name)
                    self._born(need.size_bytes, workspace=True)
            elif need >= 0:
                born.append(self._born(need, workspace=True))
            else:
                self.trace.events.append(~born[~need])
                born[~need] = -1
        for tensor in results:
            if tensor is not None:
                self._note(tensor)
        self.trace.events.extend(~number for number in reversed(born) if number >= 0)

    # Modules

    def _module(self) -> str:
        node = torch._C._current_autograd_node()
        if node is not None and not self._modules:
            return self._module_of.get(node._sequence_nr(), "")
        module = self._modules[-1] if self._modules else ""
        if torch.is_grad_enabled():
            self._module_of[cast(Any, torch.autograd)._get_sequence_nr() - 1] = (
                module  # of the node just made
            )
        return module

    def watch(self, model: torch.nn.Module) -> None:
        """Know the modules of a model by their paths."""
        self._names.update((id(module), name) for name, module in model.named_modules())

    def follow_modules(self, stack: ExitStack) -> None:
        """Keep track of the module that is at work."""

        def enter(module: torch.nn.Module, _: Any) -> None:
            self._modules.append(self._names.get(id(module)) or (self._modules[-1] if self._modules else ""))

        def leave(module: torch.nn.Module, _: Any, __: Any) -> None:
            self._modules.pop()

        hooks = torch.nn.modules.module
        stack.callback(hooks.register_module_forward_pre_hook(enter).remove)
        stack.callback(hooks.register_module_forward_hook(leave, always_call=True).remove)


def _results(result: Any) -> list[torch.Tensor | None]:
    parts = result if isinstance(result, list | tuple) else [result]
    return [part if isinstance(part, torch.Tensor) else None for part in parts]


@contextmanager
def tracing(scratch: Scratch | None = None) -> Iterator[Tracer]:
    """Tensors made inside are fake; those of the device `CARD` are noted in the tracer's `trace`.

    Args:
        scratch: (operation, arguments, keywords, result) -> what its kernels ask for; None: only results.
    """
    tracer = Tracer(scratch)
    with ExitStack() as stack:
        tracer.follow_modules(stack)
        stack.enter_context(tracer.fakes)
        stack.enter_context(tracer)
        tracer.calibrate()
        yield tracer


def place_on_card(model: torch.nn.Module) -> torch.nn.Module:
    """Move a model of fake tensors to the card, in the order in which `nn.Module.to` does it.

    `nn.Module.to` itself swaps fake parameters with new ones, which fails where anything refers to them.
    """
    for child in model.children():
        place_on_card(child)
    for tensors in (model._parameters, model._buffers):
        for tensor in tensors.values():
            if tensor is not None and tensor.device != CARD:
                with torch.no_grad():
                    moved = tensor.detach().to(CARD)
                tensor.data = moved
                tensor.fake_device = CARD  # type: ignore[attr-defined]
    return model
