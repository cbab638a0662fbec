"""What one region saves in one forward call, and how backward reaches it."""

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from memopt.errors import SavedTensorModifiedError
from memopt.ir import Action, CheckpointPolicy, Kind
from memopt.runtime.counters import Counters
from memopt.runtime.engine import Engine
from memopt.runtime.policy import SWAPS, policy_of
from memopt.runtime.region import Region
from memopt.runtime.slot import Slot
from memopt.tensors import kind_of, storage_keys

_PLAIN = (torch.Tensor, nn.Parameter)
"""The classes whose storage is all there is to them; subclasses stay on the device."""

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class Group:
    """The saves of one region in one forward call. Handles own it; groups hold each other weakly."""

    __slots__ = (
        "__weakref__", "counters", "engine", "has_successor", "previous", "thread",
        "_buffers", "_outer", "_parameters", "_policy", "_reached", "_region", "_slots",
    )  # fmt: skip

    def __init__(self, region: Region, engine: Engine, counters: Counters, module: nn.Module) -> None:
        self.engine = engine
        self.counters = counters
        self.thread = threading.get_ident()
        self.has_successor = False
        self.previous: weakref.ref[Group] | None = None
        self._region = region
        self._policy = policy_of(region.policy) if region.action is Action.SWAP else _keep_all
        self._reached = False
        self._slots: list[weakref.ref[Slot]] = []
        # Taken at each call, since FSDP2 unshards parameters only now.
        self._parameters = storage_keys(module.parameters())
        self._buffers = storage_keys(module.buffers())
        self._outer: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def pack(self, tensor: torch.Tensor) -> "Kept | Swapped":
        """Decide on one saved tensor: the hook that autograd calls in the region's forward."""
        if not self._swaps(tensor):
            return Kept(self, tensor, self._outer)
        slot = self.engine.slot_for(tensor, self.counters)
        self._slots.append(weakref.ref(slot))
        return Swapped(self, slot, tensor)

    def close(self) -> None:
        """Start the copies of the whole group at once.

        Not in pack: a saved output may be filled after it is packed, and a stream switch a tensor is too dear.
        """
        self.engine.copy_out(self.slots(), self.counters)

    def slots(self) -> list[Slot]:
        """Return the slots that backward still needs, each once."""
        return list(dict.fromkeys(slot for ref in self._slots if (slot := ref()) is not None))

    def reach(self) -> None:
        """Note that backward is here: bring the rest of this group back, and the one before it."""
        if self._reached:
            return
        self._reached = True
        if not self._region.group_swap:
            return
        self.engine.load(self.slots(), self.counters)
        before = self.previous and self.previous()
        while before and not before._slots:
            before = before.previous and before.previous()
        if before:
            before.engine.load(before.slots(), before.counters)

    def _swaps(self, tensor: torch.Tensor) -> bool:
        if (
            type(tensor) not in _PLAIN
            or tensor.layout is not torch.strided
            or tensor.device != self.engine.backend.device
        ):
            return False
        if tensor.is_conj() or tensor.is_neg() or self._policy(tensor) not in SWAPS:
            return False
        return kind_of(tensor, self._parameters, self._buffers) is Kind.ACTIVATION

    @property
    def fqn(self) -> str:
        """The region's module."""
        return self._region.fqn


class Kept:
    """A saved tensor that stays on the device, or is left to the hooks around the region."""

    __slots__ = ("_group", "_unpack", "_value", "_version")

    def __init__(self, group: Group, tensor: torch.Tensor, outer: Hooks | None) -> None:
        self._group = group
        self._version = tensor._version
        # Detached: a tensor with a grad_fn, held here, would keep its own graph alive for ever.
        self._value = outer[0](tensor) if outer else tensor.detach()
        self._unpack = outer[1] if outer else None

    def unpack(self) -> torch.Tensor:
        """Return the tensor; raise SavedTensorModifiedError if it was written to since."""
        self._group.reach()
        if self._unpack is not None:
            return self._unpack(self._value)
        _check_version(self._group, self._value, self._version, self._value.shape)
        return self._value


class Swapped:
    """A saved tensor whose storage is a slot; many of these may share one."""

    __slots__ = ("_dtype", "_group", "_offset", "_shape", "_slot", "_stride", "_version", "_witness")

    def __init__(self, group: Group, slot: Slot, tensor: torch.Tensor) -> None:
        self._group = group
        self._slot = slot
        self._dtype = tensor.dtype
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset()
        self._version = tensor._version
        # Shares the tensor's version counter, but none of its memory.
        self._witness = tensor.detach()
        self._witness.data = _NOTHING

    def unpack(self) -> torch.Tensor:
        """Return the tensor, exact in class, dtype, size and stride; raise as `Kept.unpack`."""
        self._group.reach()
        _check_version(self._group, self._witness, self._version, self._shape)
        storage = self._group.engine.storage_of(self._slot, self._group.counters)
        empty = torch.empty(0, dtype=self._dtype, device=storage.device)
        return empty.set_(storage, self._offset, self._shape, self._stride)


_NOTHING = torch.empty(0)


def unpack(handle: Kept | Swapped) -> torch.Tensor:
    """Return what a handle stands for: the hook that autograd calls in backward."""
    return handle.unpack()


def _check_version(group: Group, witness: torch.Tensor, saved_version: int, shape: Iterable[int]) -> None:
    if witness._version != saved_version:
        raise SavedTensorModifiedError(group.fqn, tuple(shape), saved_version, witness._version)


def _keep_all(tensor: torch.Tensor) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


class _ModuleState:
    """What is going on in one rewritten module; lives beside the module, not in it, and dies with it."""

    __slots__ = ("counters", "groups")

    def __init__(self) -> None:
        self.counters = Counters()
        self.groups: list[weakref.ref[Group]] = []


_STATES: WeakKeyDictionary[nn.Module, _ModuleState] = WeakKeyDictionary()
_LOCK = threading.Lock()


def counters_of(module: nn.Module) -> Counters:
    """Return a module's counters, made when first asked for."""
    with _LOCK:
        return _state(module).counters


def link(group: Group, module: nn.Module, previous: nn.Module | None) -> None:
    """Put a new group of a module behind the group that it follows in this thread's forward.

    That is the oldest live one of the previous module that has no successor yet: with several microbatches in flight
    their forwards pair up in order. A wrong pair costs time, never values.
    """
    with _LOCK:
        state = _state(module)
        state.groups = [ref for ref in state.groups if ref() is not None]
        state.groups.append(weakref.ref(group))
        for ref in _state(previous).groups if previous is not None else ():
            before = ref()
            if before is not None and before.thread == group.thread and not before.has_successor:
                before.has_successor = True
                group.previous = ref
                return


def _state(module: nn.Module) -> _ModuleState:
    state = _STATES.get(module)
    if state is None:
        state = _STATES[module] = _ModuleState()
    return state
