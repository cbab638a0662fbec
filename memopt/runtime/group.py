"""What one region saves in one forward call, and how backward reaches it."""

import threading
import weakref
from dataclasses import replace
from typing import Any

import torch

from memopt.operands import PLAIN
from memopt.runtime.choice import Choice
from memopt.runtime.counters import Counters
from memopt.runtime.engine import Engine
from memopt.runtime.handles import Hooks, Kept, Swapped, check_version, unpack
from memopt.runtime.region import Region
from memopt.runtime.roles import Lesson, Move, Table
from memopt.runtime.slot import Slot
from memopt.tensors import is_parameter, storage_key

Stayed = tuple[torch.Tensor, int]
"""A saved tensor that stays on the device, and the version that was saved; without its graph, as in `Kept`."""


class Group:
    """The saves of one region in one forward call. Handles own it; groups hold each other weakly."""

    __slots__ = (
        "__weakref__", "_choice", "_known", "_lesson", "_moves", "_outer", "_position", "_reached", "_region", "_slots",
        "_table", "counters", "engine", "fits_table", "forward", "has_successor", "previous", "thread",
    )  # fmt: skip

    def __init__(
        self,
        region: Region,
        engine: Engine,
        counters: Counters,
        choice: Choice,
        *,
        table: Table | None = None,
        lesson: Lesson | None = None,
    ) -> None:
        self.engine = engine
        self.counters = counters
        self.thread = threading.get_ident()
        self.has_successor = False
        self.previous: weakref.ref[Group] | None = None
        self.forward: object = object()
        """Stands for the forward of the model, the same for all groups of a chain in it."""
        self.fits_table = table is not None
        self._region = region
        self._choice: Choice | None = choice
        self._table = table or ()
        self._lesson = lesson
        self._moves: list[Move] = []
        """Of each save of a call that learns whether it may ever move."""
        self._position = 0
        self._reached = False
        self._slots: list[weakref.ref[Slot]] = []
        self._known: dict[tuple[int, int], Slot] = {}
        """By (storage, version), until the forward ends: as long as a slot is held its storage's address is taken."""
        self._outer: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)

    @property
    def fqn(self) -> str:
        """The region's module."""
        return self._region.fqn

    def pack(self, tensor: torch.Tensor) -> Any:
        """Decide on one saved tensor: the hook that autograd calls in the region's forward."""
        if self._lesson:
            handle = (
                Swapped(self, tensor, slot) if (slot := self._slot_for(tensor)) else Kept(self, tensor, self._outer)
            )
            self._lesson.note(tensor, handle)
            assert self._choice is not None
            self._moves.append(Move.STAY if self._choice.stays_by_looks(tensor) else Move.WHOLE)
            return handle
        slot = self._slot_for(tensor) if self._may_move(tensor) else None
        return Swapped(self, tensor, slot) if slot else self._stayed(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return what stands for a saved tensor: the hook that autograd calls in backward."""
        if not isinstance(packed, tuple):
            return unpack(packed)
        self.reach()
        tensor, version = packed
        check_version(self, tensor, version, tensor.shape)
        return tensor  # type: ignore[no-any-return]

    def learned(self, table: Table) -> Table:
        """Return what further calls know of this one's saves."""
        return tuple(replace(entry, move=move) for entry, move in zip(table, self._moves, strict=True))

    def close(self) -> None:
        """Start the copies of the whole group at once, and let go of what only the forward needed.

        Not in pack: a saved output may be filled after it is packed, and a stream switch a tensor is too dear.
        """
        self.fits_table = self.fits_table and self._position == len(self._table)
        self.let_go()
        offload = self._region.offload
        self.engine.copy_out(self.slots(), self.counters, max_inflight=offload.max_inflight if offload else None)

    def let_go(self) -> None:
        """Let go of what only the forward needed; of one that fails too, as some of it may hold the graph that holds it."""
        self._choice = self._lesson = self._outer = None
        self._known.clear()

    def slots(self) -> list[Slot]:
        """Return the slots that backward still needs."""
        return [slot for slot in (ref() for ref in self._slots) if slot is not None]

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

    def _stayed(self, tensor: torch.Tensor) -> Kept | Stayed:
        """Return what holds a tensor that stays: most of a region's saves do, and have nothing but a version to check."""
        if self._outer is not None or type(tensor) not in PLAIN:
            return Kept(self, tensor, self._outer)
        return tensor if is_parameter(tensor) else tensor.detach(), tensor._version

    def _may_move(self, tensor: torch.Tensor) -> bool:
        """Tell whether a save is not known to stay, and note whether it is the one that was learned for its position."""
        position, self._position = self._position, self._position + 1
        if not self.fits_table or position >= len(self._table):
            self.fits_table = False
            return True
        entry = self._table[position]
        self.fits_table = entry.fits(tensor)
        return not self.fits_table or entry.move is not Move.STAY

    def _slot_for(self, tensor: torch.Tensor) -> Slot | None:
        """Return the slot of a tensor's storage at its version, if it is swapped; a second save shares the first one's."""
        assert self._choice is not None
        if not self._choice.passes(tensor):
            return None
        key = (storage_key(tensor), tensor._version)
        slot = self._known.get(key)
        if slot is None and self._choice.is_activation(tensor):
            slot = self._known[key] = Slot(self.engine, tensor)
            self._slots.append(weakref.ref(slot))
            self.counters.registered_tensors += 1
            self.counters.registered_bytes += slot.num_bytes
        return slot
