"""What is going on in a rewritten module; it lives beside the module, not in it, and dies with it."""

import threading
import weakref
from weakref import WeakKeyDictionary

from torch import nn

from memopt.runtime.counters import Counters
from memopt.runtime.group import Group
from memopt.runtime.roles import MAX_TABLES, Signature, Table


class ModuleState:
    """One module's counters, its live groups and the tables it has learned."""

    __slots__ = ("counters", "groups", "tables")

    def __init__(self) -> None:
        self.counters = Counters()
        self.groups: list[weakref.ref[Group]] = []
        self.tables: dict[Signature, Table] = {}

    def remember(self, signature: Signature, table: Table) -> None:
        """Keep what was learned for a signature, and of all of it the newest."""
        self.tables[signature] = table
        while len(self.tables) > MAX_TABLES:
            self.tables.pop(next(iter(self.tables)), None)


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
                group.previous = ref
                return


def _state(module: nn.Module) -> ModuleState:
    state = _STATES.get(module)
    if state is None:
        state = _STATES[module] = ModuleState()
    return state
