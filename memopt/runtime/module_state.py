"""What is going on in a rewritten module; it lives beside the module, not in it, and dies with it."""

import threading
import weakref
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from memopt.runtime.counters import Counters
from memopt.runtime.group import Group
from memopt.runtime.roles import MAX_TABLES, Signature, Table

MAX_MISFITS = 3
"""How often a forward may differ from what was learned of it until every call of it is learned (loops over experts)."""


class ModuleState:
    """One module's counters, its live groups and the tables it has learned."""

    __slots__ = ("_misfits", "counters", "groups", "sizes", "swapped", "tables")

    def __init__(self) -> None:
        self.counters = Counters()
        self.groups: list[weakref.ref[Group]] = []
        self.tables: dict[Signature, Table] = {}
        self.sizes: tuple[Signature, dict[str, dict[Any, int]]] | None = None
        """Of a layer of parts: what would move of each part, by storage, if it has learned since the last decision."""
        self.swapped: dict[Signature, frozenset[str]] = {}
        """Of a layer of parts: which are swapped, where a signature has another answer than the plan."""
        self._misfits: Counter[Signature] = Counter()

    def table_of(self, signature: Signature) -> Table | None:
        """Return what was learned for a signature; None where the forward took another way too often to rely on it."""
        return None if self._misfits[signature] >= MAX_MISFITS else self.tables.get(signature)

    def forget(self, signature: Signature) -> None:
        """Learn anew: a call did not save what was learned."""
        self.tables.pop(signature, None)
        self._misfits[signature] += 1

    def remember(self, signature: Signature, table: Table) -> None:
        """Keep what was learned for a signature, and of all of it the newest."""
        self.tables[signature] = table
        while len(self.tables) > MAX_TABLES:
            self.tables.pop(oldest := next(iter(self.tables)), None)
            self.swapped.pop(oldest, None)


_STATES: WeakKeyDictionary[nn.Module, ModuleState] = WeakKeyDictionary()
_LOCK = threading.Lock()


def state_of(module: nn.Module) -> ModuleState:
    """Return a module's state, made when first asked for."""
    with _LOCK:
        return _state(module)


def forget_state(module: nn.Module) -> None:
    """Begin anew: what was counted and learned belongs to the rewriting that ends."""
    with _LOCK:
        _STATES.pop(module, None)


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
                group.previous, group.forward = ref, before.forward
                return


def _state(module: nn.Module) -> ModuleState:
    state = _STATES.get(module)
    if state is None:
        state = _STATES[module] = ModuleState()
    return state
