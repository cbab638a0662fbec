"""Learn which save is which in a region's forward, once a signature; afterwards pack is a table look-up."""

import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memopt.autograd import packed_saves, sequence_number

MAX_TABLES = 32
"""How many signatures a module remembers; with more (every batch another length) the oldest is learned again."""


@dataclass(frozen=True, slots=True)
class Role:
    """What a saved tensor is in a region: as `SavedTensor.role`, with the owner's name relative to the region."""

    child: str
    node: str
    field: str
    occurrence: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One save of a region's forward, by position."""

    role: Role | None
    """None for a save whose graph was dropped within the forward."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    swaps: bool

    def fits(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor may be the save that was learned."""
        return (
            tensor.shape == self.shape
            and tensor.dtype is self.dtype
            and tensor.requires_grad is self.requires_grad
            and tensor.stride() == self.stride
        )


Table = tuple[Entry, ...]
Signature = tuple[Any, ...]


def signature(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device_type: str) -> Signature:
    """Return what a region's saves depend on: inputs, autocast, mode, attention implementation.

    What else they depend on (which parameters need grad, adapters, patches) shows when an entry does not fit.
    """
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    return (
        module.training,
        autocast,
        getattr(getattr(module, "config", None), "_attn_implementation", None),
        _described(args),
        tuple((name, _described(kwargs[name])) for name in sorted(kwargs)),
    )


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return type(value), value.shape, value.dtype, value.requires_grad
    if isinstance(value, (tuple, list)):
        return tuple(_described(one) for one in value)
    return value if isinstance(value, (bool, int, float, str)) else type(value)


class Lesson:
    """What is noted in the forward from which a table is learned."""

    def __init__(self) -> None:
        self._since = sequence_number()
        self._thread = threading.get_ident()  # another thread may run the same modules meanwhile
        self._calls = [("", 0)]
        self._num_calls = 0
        self._notes: list[tuple[tuple[str, int], Entry, weakref.ref[Any]]] = []

    def note(self, tensor: torch.Tensor, swaps: bool, handle: Any) -> None:
        """Note one save, in order; by its handle it is found again, as long as autograd holds that."""
        entry = Entry(None, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, swaps)
        self._notes.append((self._calls[-1], entry, weakref.ref(handle)))

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Know which module inside the region is running."""
        with ExitStack() as stack:
            for name, child in module.named_modules():
                if child is not module:
                    stack.enter_context(self._watching_child(name, child))
            yield

    @contextmanager
    def _watching_child(self, name: str, child: nn.Module) -> Iterator[None]:
        def begin(*_: Any) -> None:
            if threading.get_ident() == self._thread:
                self._num_calls += 1
                self._calls.append((name, self._num_calls))

        def end(*_: Any) -> None:
            if threading.get_ident() == self._thread:
                self._calls.pop()

        hooks = child.register_forward_pre_hook(begin), child.register_forward_hook(end, always_call=True)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def table(self, output: Any) -> Table:
        """Return what was learned, given the forward's output."""
        names = {id(packed): (node, field) for node, field, packed in packed_saves(output, since=self._since)}
        occurrences: Counter[Any] = Counter()
        entries = []
        for call, entry, ref in self._notes:
            handle = ref()
            if handle is None or id(handle) not in names:
                entries.append(entry)
                continue
            node, field = names[id(handle)]
            role = Role(call[0], node, field, occurrences[call, node, field])
            occurrences[call, node, field] += 1
            entries.append(replace(entry, role=role))
        return tuple(entries)
