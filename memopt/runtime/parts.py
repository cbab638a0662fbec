"""The saves of a layer of which some named parts are swapped, and of parts that are recomputed only recipes are kept."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from memopt.ir.regions import Save, regions_in
from memopt.operands import TENSORS
from memopt.runtime.group import Group, Stayed
from memopt.runtime.handles import Kept, Swapped
from memopt.runtime.recipe import Recipe
from memopt.runtime.replan import WHOLE, Sizes
from memopt.runtime.replay.outputs import Output
from memopt.runtime.roles import Move, Table
from memopt.runtime.slot import Slot
from memopt.tensors import cast_source, storage_key

Handle = Kept | Swapped | Recipe


class _Note(NamedTuple):
    """One save of a call that learns."""

    storage: int
    geometry: tuple[Any, ...]
    num_bytes: int
    storage_bytes: int
    tensor: torch.Tensor | None
    """Of what may be swapped, without its graph."""
    handle: "weakref.ref[Handle]"
    is_recipe: bool


class PartsGroup(Group):
    """The saves of one layer in one forward call, each swapped or kept by the name of its part.

    What a save is shows only at the end of a first forward: until then everything that may be swapped has a slot, and
    the slots of what stays are never copied. Later calls know it by position.
    """

    __slots__ = ("_notes", "_outputs", "_swapped_parts", "_watches_casts", "sizes")

    def __init__(self, *args: Any, swapped: frozenset[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._swapped_parts = swapped
        self.sizes: dict[str, Sizes] = {}
        """What a call that learns would move of each part that is decided on."""
        self._notes: list[_Note] = []
        self._outputs: dict[int, Output] = {}
        self._watches_casts = any(map(torch.is_autocast_enabled, {"cpu", self.engine.backend.device.type}))

    def take(self, output: Output) -> None:
        """Note a tensor that can be made again: whoever saves it gets a recipe."""
        self._outputs[output.storage] = output

    def pack(self, tensor: torch.Tensor) -> Handle | Stayed:
        """Decide on one saved tensor: the hook that autograd calls in the layer's forward."""
        handle: Handle | None = self._recipe(tensor) if self._outputs else None
        if self._lesson:
            is_recipe = handle is not None
            handle = handle or self._in_lesson(tensor)
            self._lesson.note(tensor, handle)
            self._note(tensor, handle, is_recipe=is_recipe)
            return handle
        position, self._position = self._position, self._position + 1
        return handle or self._by_position(tensor, position)

    def learned(self, table: Table) -> Table:
        """Return a table with what becomes of each save, and do so with the saves of this call."""
        moves = self._ways(table)
        for note, move in zip(self._notes, moves, strict=True):
            handle = note.handle()
            if move is Move.STAY or not isinstance(handle, Swapped):
                continue
            assert note.tensor is not None
            handle.move_to(self._slot(note.tensor, gathers=move is Move.GATHER))
        return tuple(replace(entry, move=move) for entry, move in zip(table, moves, strict=True))

    def let_go(self) -> None:
        """Let go of what only the forward needed: an output knows its graph, which holds the group."""
        self._notes.clear()
        self._outputs.clear()
        super().let_go()

    def _in_lesson(self, tensor: torch.Tensor) -> Handle:
        assert self._choice is not None
        if self._outer is not None or not self._choice.swaps(tensor):  # hooks of the user's get everything once
            return Kept(self, tensor, self._outer)
        return Swapped(self, tensor, Slot(self.engine, tensor))

    def _by_position(self, tensor: torch.Tensor, position: int) -> Handle | Stayed:
        assert self._choice is not None
        move = self._move_at(tensor, position)
        if move is Move.STAY or not self._choice.passes(tensor):  # that it is no parameter was seen when it was learned
            return self._stayed(tensor)
        return Swapped(self, tensor, self._slot(tensor, gathers=move is Move.GATHER))

    def _move_at(self, tensor: torch.Tensor, position: int) -> Move:
        """Return what was learned for a position; only where something is to move it must be what was learned."""
        if not self.fits_table or position >= len(self._table):
            self.fits_table = False
            return Move.STAY
        entry = self._table[position]
        if entry.move is not Move.STAY:
            self.fits_table = entry.fits(tensor)
        return entry.move if self.fits_table else Move.STAY

    def _slot(self, tensor: torch.Tensor, *, gathers: bool) -> Slot:
        """Return the slot of a tensor's storage at its version, shared with whoever in this forward has saved it before.

        Not with an earlier forward: a batch may have been written into the same memory since, by what counts no versions.
        """
        whole = self.forward, storage_key(tensor), tensor._version
        key = (*whole, *_geometry(tensor)) if gathers else whole
        slot = self._known.get(key)
        if slot is None and gathers and whole in self.engine.shared:
            return self._slot(tensor, gathers=False)
        if slot is None:
            slot = self.engine.shared.get(key)
        if slot is None:
            slot = self.engine.shared[key] = Slot(self.engine, tensor, gathers=gathers)
            self.counters.registered_tensors += 1
            self.counters.registered_bytes += slot.num_bytes
        if key not in self._known:
            self._known[key] = slot
            self._slots.append(weakref.ref(slot))
        return slot

    def _recipe(self, tensor: torch.Tensor) -> Recipe | None:
        if tensor.layout is not torch.strided or type(tensor) not in TENSORS:
            return None
        output = self._outputs.get(storage_key(tensor))
        if output is not None:
            return Recipe(self, tensor, output) if output.is_seen_in(tensor) else None
        if self._watches_casts and (source := next(self._cast_of(tensor), None)):
            return Recipe(self, tensor, source, casts=True)
        return None

    def _cast_of(self, tensor: torch.Tensor) -> Iterator[Output]:
        """Yield the output that a tensor is a cast of, as autocast makes them."""
        source = cast_source(tensor)
        if source is not None:
            yield from (output for output in self._outputs.values() if output.is_cast_in(tensor, source))

    def _note(self, tensor: torch.Tensor, handle: Handle, *, is_recipe: bool) -> None:
        plain = tensor.layout is torch.strided and not tensor.is_nested
        storage = tensor.untyped_storage() if plain else None
        self._notes.append(
            _Note(
                storage=storage._cdata if storage else -len(self._notes) - 1,
                geometry=_geometry(tensor) if plain else (),
                num_bytes=tensor.numel() * tensor.element_size() if plain else 0,
                storage_bytes=storage.nbytes() if storage else 0,
                tensor=tensor.detach() if isinstance(handle, Swapped) else None,
                handle=weakref.ref(handle),
                is_recipe=is_recipe,
            )
        )

    def _ways(self, table: Table) -> list[Move]:
        """Return what becomes of each save: of a storage all saves are swapped or none, else copying frees nothing."""
        names = self._names(table)
        moves = [Move.STAY] * len(table)
        for positions in self._storages():
            parts = {names[n] for n in positions}
            if "" in parts or any(self._notes[n].tensor is None for n in positions):
                continue
            move, copies = _way([self._notes[n] for n in positions])
            self.sizes.setdefault(names[positions[0]], {}).update(copies)
            if parts <= self._swapped_parts:
                for n in positions:
                    moves[n] = move
        return moves

    def _names(self, table: Table) -> list[str]:
        """Return for each save the part of it that is decided on, empty where none is."""
        saves = [Save(entry.owner, entry.role.node if entry.role else "") for entry in table]
        return [self._region.part_of(name) for name in regions_in(saves, self._region.claimed)]

    def _storages(self) -> Iterable[list[int]]:
        """Return the positions of the saves of each storage, recipes left out.

        And those whose graph was dropped again, as a router's is that only chooses: their storages are gone, and what
        identified them may identify others now.
        """
        storages: dict[int, list[int]] = {}
        for position, note in enumerate(self._notes):
            if not note.is_recipe and note.handle() is not None:
                storages.setdefault(note.storage, []).append(position)
        return storages.values()


def _way(notes: Sequence[_Note]) -> tuple[Move, Sizes]:
    """Return how a storage goes, and its copies then: as it is, if what is saved of it is at least half of it."""
    storage, storage_bytes = notes[0].storage, notes[0].storage_bytes
    views = {(storage, note.geometry): note.num_bytes for note in notes}
    if 2 * sum(views.values()) >= storage_bytes:
        return Move.WHOLE, {(storage, WHOLE): storage_bytes}
    return Move.GATHER, views


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
