"""Learn which save is which in a region's forward, once a signature; afterwards its position tells."""

import enum
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memopt.autograd import packed_saves, sequence_number

MAX_TABLES = 32
"""How many signatures a module remembers; with more (every batch another length) the oldest is learned again."""
MAX_DEPTH = 3
MAX_LENGTH = 64
"""How deep and how long an argument may be to be a part of the signature."""


@dataclass(frozen=True, slots=True)
class Role:
    """What a saved tensor is in a region: as `SavedTensor.role`, with the owner's name relative to the region."""

    child: str
    node: str
    field: str
    occurrence: int


class Move(enum.Enum):
    """What becomes of a save that its part's name decides on."""

    STAY = enum.auto()
    WHOLE = enum.auto()
    """Its storage is swapped, with all other views of it."""
    GATHER = enum.auto()
    """Of its storage too little is saved: what is swapped is a copy of the view's own values."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One save of a region's forward, by position."""

    role: Role | None
    """None for a save whose graph was dropped within the forward."""
    looks: "Looks"
    owner: str = ""
    """The path of the module that saved it, from the region; known for every save."""
    move: "Move" = Move.STAY
    """What a group of parts has decided on it; in a whole region only STAY says anything: all of its looks stay."""

    def fits(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor looks like the save that was learned."""
        return looks_of(tensor) == self.looks


Looks = tuple[Any, ...]


def looks_of(tensor: torch.Tensor) -> Looks:
    """Return class, dtype, need of grad and geometry of a tensor; sparse and nested ones have no strides."""
    plain = tensor.layout is torch.strided and not tensor.is_nested
    geometry = (tensor.shape, tensor.stride()) if plain else (tensor.layout,)
    return type(tensor), tensor.dtype, tensor.requires_grad, geometry


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
        tuple([(name, _described(value)) for name, value in kwargs.items()]),
    )


def _described(value: Any, depth: int = 0) -> Any:
    if isinstance(value, torch.Tensor):
        return type(value), value.shape if not value.is_nested else None, value.dtype, value.requires_grad
    if isinstance(value, (tuple, list)):
        short = depth < MAX_DEPTH and len(value) <= MAX_LENGTH
        return tuple([_described(one, depth + 1) for one in value]) if short else (type(value), len(value))
    return value if isinstance(value, (bool, int, float, str)) else type(value)


class Lesson:
    """What is noted in the forward from which a table is learned."""

    def __init__(self) -> None:
        self._since = sequence_number()
        self._thread = threading.get_ident()  # another thread may run the same modules meanwhile
        self._calls = [("", 0)]
        self._num_calls = 0
        self._over = False
        self._notes: list[tuple[tuple[str, int], Entry, weakref.ref[Any]]] = []

    def note(self, tensor: torch.Tensor, handle: Any) -> None:
        """Note one save, in order; by its handle it is found again, as long as autograd holds that."""
        self._notes.append((self._calls[-1], Entry(None, looks_of(tensor), self._calls[-1][0]), weakref.ref(handle)))

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Know which module inside the region is running."""
        hooks: list[RemovableHandle] = []
        try:
            for name, child in module.named_modules():
                if child is not module and not isinstance(child, torch.jit.ScriptModule):
                    self._watch(name, child, hooks)
            yield
        finally:
            self._over = True  # should an interrupt come between, a hook that is left removes itself when it is called
            _remove(hooks)

    def _watch(self, name: str, child: nn.Module, hooks: list[RemovableHandle]) -> None:
        def begin(*_: Any) -> None:
            if self._over:
                _remove(hooks)
            elif threading.get_ident() == self._thread:
                self._num_calls += 1
                self._calls.append((name, self._num_calls))

        def end(*_: Any) -> None:
            if not self._over and threading.get_ident() == self._thread:
                self._calls.pop()

        hooks.append(child.register_forward_pre_hook(begin))
        hooks.append(child.register_forward_hook(end, always_call=True))

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


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
