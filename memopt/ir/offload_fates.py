"""What becomes of each save of an offloaded module: it moves, or it stays, and why."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

from memopt.ir.graph import Kind, ModuleCall, ModuleGraph
from memopt.ir.offload import Offload
from memopt.ir.plan import Action, Plan, RegionKey
from memopt.ir.region_groups import Entry, Seen
from memopt.ir.region_search import region_layers

NO_REGION = "in no region"
UNDER = "under "
"""What the reason begins with of what has fewer elements than are asked for."""
_Geometry = tuple[object, ...]


@dataclass(slots=True, kw_only=True)
class GroupFate:
    """What one group came to; grows as the forward is followed."""

    key: RegionKey
    num_tensors: int = 0
    moved_bytes: int = 0
    duplicate_bytes: int = 0
    kept: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Storage -> (why it stays, its bytes)."""


class Fates:
    """A forward followed from save to save: what moves, in which group, and what stays."""

    def __init__(self, plan: Plan, seen: Seen) -> None:
        self._plan, self._settings = plan, plan.offload or Offload()
        self._items = _ItemSizes(plan.graph)
        self.seen = seen
        self.groups: dict[RegionKey, GroupFate] = {}
        """In forward order."""
        self.moved_saves: set[int] = set()
        self.reasons: dict[int, str] = {}
        """Save -> why it stays, of those that some offloaded module sees."""
        self.inputs: dict[int, tuple[str, int]] = {}
        """Storage -> (why it stays, its bytes), of what recomputed parts were called with."""
        self._copied: set[tuple[int, _Geometry]] = set()
        self.seen_inputs: set[int] = set()
        """Storages of what was recomputed was called with, as far as some offloaded module sees them."""
        for call, entries in seen.calls():
            self._follow(call, entries)
            self.seen_inputs |= {e.storage for e in entries if e.tensor is None}
        self._add_unseen_inputs(self.seen_inputs)
        self._name_the_rest()

    def _follow(self, call: ModuleCall, entries: Sequence[Entry]) -> None:
        storages: dict[int, list[Entry]] = {}
        for entry in entries:
            storages.setdefault(entry.storage, []).append(entry)
            if decided(self._plan, call, entry.group):
                self.groups.setdefault(entry.group, GroupFate(key=entry.group))
        for saves in storages.values():
            own = [self._why_it_stays(entry) for entry in saves]
            if any(own):
                self._keep(saves, own)
            else:
                self._move(saves)

    def _why_it_stays(self, entry: Entry) -> str:
        """Return why a save alone would stay, empty where it would move."""
        if entry.tensor is not None and entry.tensor.kind is not Kind.ACTIVATION:
            return entry.tensor.kind.value
        decision = self._plan.decisions.get(entry.group) if entry.group.region else None
        if decision is None:
            return f"{entry.group.region} is not offloaded" if entry.group.region else NO_REGION
        if self._numel(entry) < self._settings.min_tensor_elements:
            return f"{UNDER}{self._settings.min_tensor_elements:,} elements"
        return "" if decision.action is Action.SWAP else decision.why.partition(":")[0]

    def _numel(self, entry: Entry) -> int:
        if entry.tensor is not None:
            return prod(entry.tensor.shape)
        return entry.storage_bytes // self._items.of(entry.storage)

    def _keep(self, saves: Sequence[Entry], own: Sequence[str]) -> None:
        """Note why a storage stays: each save for its own reason, else for that of the first that has one."""
        offender, why = next((entry, why) for entry, why in zip(saves, own, strict=True) if why)
        for entry, reason in zip(saves, own, strict=True):
            text = reason or self._through(offender, why)
            if entry.tensor is None:
                self.inputs.setdefault(entry.storage, (text, entry.storage_bytes))
            else:
                self.reasons[entry.tensor.index] = text
            if fate := self.groups.get(entry.group):
                fate.kept.setdefault(entry.storage, (text, entry.storage_bytes))

    def _through(self, offender: Entry, why: str) -> str:
        """Return why a storage stays of which another save does."""
        alone = offender.tensor is not None and offender.tensor.kind is not Kind.ACTIVATION
        if alone or why.startswith(UNDER):
            return why
        return f"also saved by {offender.group.region or 'what is ' + NO_REGION}, which stays"

    def _move(self, saves: Sequence[Entry]) -> None:
        """Count the copies for the first group, and what the others need not copy."""
        self.moved_saves |= {entry.tensor.index for entry in saves if entry.tensor is not None}
        first = self.groups[saves[0].group]
        copies = _copies(saves)
        new = [copy for copy in copies if not self._copied & {(saves[0].storage, ()), (saves[0].storage, copy[0])}]
        self._copied |= {(saves[0].storage, geometry) for geometry, _ in new}
        first.num_tensors += len(new)
        first.moved_bytes += sum(size for _, size in new)
        all_bytes = sum(size for _, size in copies)
        first.duplicate_bytes += all_bytes - sum(size for _, size in new)
        for key in dict.fromkeys(entry.group for entry in saves[1:]):
            if key != saves[0].group:
                self.groups[key].duplicate_bytes += all_bytes

    def _add_unseen_inputs(self, seen: set[int]) -> None:
        """Note what parts were called with that no offloaded module sees."""
        for recipe in self.seen.recipes:
            for storage, size in recipe.inputs:
                if storage not in seen and not self.seen.is_recipe(storage, recipe.first_save):
                    self.inputs.setdefault(storage, ("held for a replay", size))

    def _name_the_rest(self) -> None:
        """Note the regions of what layers save that no offloaded module sees: it stays."""
        layers = set(region_layers(self.seen.graph)) - self.seen.decided.keys()
        for call in self.seen.graph.calls:
            for entry in self.seen.entries(call) if call.fqn in layers else ():
                if entry.tensor is not None and entry.tensor.index not in self.moved_saves:
                    self.reasons.setdefault(entry.tensor.index, self._why_it_stays(entry))


def decided(plan: Plan, call: ModuleCall, key: RegionKey) -> bool:
    """Tell whether a group is one that is decided on."""
    return bool(key.region) and key.fqn == call.fqn and key in plan.decisions


def _copies(saves: Iterable[Entry]) -> list[tuple[_Geometry, int]]:
    """Return what is copied of a storage: all of it, else each distinct view where they cover less than half."""
    views: dict[_Geometry, int] = {}
    for entry in saves:
        if entry.tensor is None:
            return [((), entry.storage_bytes)]
        t = entry.tensor
        views[t.shape, t.stride, t.offset, t.dtype] = t.tensor_bytes
        whole = t.storage_bytes
    return [((), whole)] if 2 * sum(views.values()) >= whole else list(views.items())


class _ItemSizes:
    """How large an element of a storage is: as some save of it has it, else as the model's input."""

    def __init__(self, graph: ModuleGraph) -> None:
        self._sizes = {t.storage: t.tensor_bytes // n for t in graph.saved if (n := prod(t.shape))}
        self._default = max(1, int("".join(filter(str.isdigit, graph.input.dtype)) or 8) // 8)

    def of(self, storage: int) -> int:
        return self._sizes.get(storage, self._default) or 1
