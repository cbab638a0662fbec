"""Run one training forward, real or fake, and note every module call and every tensor that autograd saves."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from memopt.ir.graph import Kind
from memopt.tensors import kind_of, storage_key, storage_keys


@dataclass(slots=True)
class Call:
    """One module call while it is being observed."""

    index: int
    fqn: str
    parent: int | None
    first_save: int
    end_save: int = -1


class Ticket:
    """What the pack hook returns; it lives as long as autograd holds the save."""

    __slots__ = ("__weakref__", "index")

    def __init__(self, index: int) -> None:
        self.index = index


@dataclass(slots=True)
class Save:
    """One save while it is being observed."""

    tensor: torch.Tensor
    call: int
    kind: Kind
    requires_grad: bool
    ticket: "weakref.ref[Ticket]"
    node: str = "Unknown"
    field: str = "?"


@dataclass(slots=True)
class Observation:
    """Everything that was noted in one forward."""

    calls: list[Call] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    flows: dict[tuple[int, int], None] = field(default_factory=dict)
    makers: dict[int, tuple[StorageWeakRef, int | None]] = field(default_factory=dict)
    """Storage -> (weak reference, so that its address is not given to another storage; call that made it)."""
    held: set[int] = field(default_factory=set)
    output: Any = None
    active: list[Call] = field(default_factory=list)


def observe(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, seen: Observation | None = None
) -> Observation:
    """Run ``model(*args, **kwargs)`` with grad and return what was noted, in `seen` if the caller brings one."""
    seen = seen if seen is not None else Observation()
    inputs = (args, kwargs)
    for tensor in (*model.parameters(), *model.buffers(), *_tensors(inputs)):
        _made(seen, tensor, None)
    with ExitStack() as stack:
        for fqn, module in model.named_modules():
            stack.enter_context(_call_hooks(seen, module, fqn))
        stack.enter_context(_Flows(seen))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*_saving_hooks(seen, model)))
        seen.output = model(*args, **kwargs)
    seen.held |= storage_keys(_tensors((inputs, seen.output)))
    return seen


@contextmanager
def _call_hooks(seen: Observation, module: nn.Module, fqn: str) -> Iterator[None]:
    def begin(module: nn.Module, args: Any) -> None:
        parent = seen.active[-1].index if seen.active else None
        call = Call(len(seen.calls), fqn, parent, len(seen.saves))
        seen.calls.append(call)
        seen.active.append(call)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        seen.active.pop().end_save = len(seen.saves)

    before = module.register_forward_pre_hook(begin)
    after = module.register_forward_hook(end)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def _saving_hooks(seen: Observation, model: nn.Module) -> tuple[Callable[..., Any], Callable[..., Any]]:
    parameters, buffers = storage_keys(model.parameters()), storage_keys(model.buffers())

    def pack(tensor: torch.Tensor) -> Ticket:
        ticket = Ticket(len(seen.saves))
        call = seen.active[-1].index
        kind = kind_of(tensor, parameters, buffers)
        seen.saves.append(Save(tensor.detach(), call, kind, tensor.requires_grad, weakref.ref(ticket)))
        _made(seen, tensor, call)
        return ticket

    def unpack(ticket: Ticket) -> torch.Tensor:
        return seen.saves[ticket.index].tensor

    return pack, unpack


class _Flows(TorchFunctionMode):
    """Note in which module call each storage is made, and in which others it is used."""

    def __init__(self, seen: Observation) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._seen.active and (made := _tensors(out)):
            here = self._seen.active[-1].index
            for tensor in _tensors((args, kwargs)):
                _, maker = self._seen.makers.get(storage_key(tensor), (None, None))
                if maker is not None and maker != here:
                    self._seen.flows[maker, here] = None  # a dict keeps the order of first use
            for tensor in made:
                _made(self._seen, tensor, here)
        return out


def _made(seen: Observation, tensor: torch.Tensor, call: int | None) -> None:
    if tensor.layout is torch.strided and (key := storage_key(tensor)) not in seen.makers:
        seen.makers[key] = (StorageWeakRef(tensor.untyped_storage()), call)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]
