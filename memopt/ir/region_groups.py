"""What each offloaded module, and each layer with recomputed parts, sees of a forward: its saves, each with its region.

The runtime sees the same, in the same order: what is saved inside of a recomputed part is not there, and at the end of
the part stands what it was called with.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from memopt.ir.graph import ModuleCall, ModuleGraph, PartCall, SavedTensor
from memopt.ir.plan import OFFLOAD, RECIPE, Action, Plan, RegionKey, enclosing
from memopt.ir.region_search import path_in, region_layers
from memopt.ir.regions import FUSED_GROUP_MLP, FUSED_PARTS, MODULE, Save, regions_in


class Entry(NamedTuple):
    """One save as an offloaded module sees it, or one tensor that a recomputed part in it was called with."""

    storage: int
    storage_bytes: int
    owner: str
    """The FQN of the module that saved it, or of the part."""
    tensor: SavedTensor | None
    """None for what a part was called with."""
    group: RegionKey = RegionKey("")
    """Its group; the region is empty where it is in none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeCall:
    """One call of a recomputed part whose output is not kept; or of a module that is recomputed as a whole."""

    key: RegionKey
    fqn: str
    """The module that was called, or whose method it was."""
    first_save: int
    end_save: int
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]
    """Of a module as a whole none: they are kept as usual."""
    flops: int


class Seen:
    """A forward under a plan, as far as offload and recipes are concerned."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.graph = plan, plan.graph
        self.recipes = tuple(sorted(_recomputed(plan, as_recipes=True), key=lambda recipe: recipe.end_save))
        whole = tuple(_recomputed(plan, as_recipes=False))
        self.replayed = _saves_in(self.recipes)
        """Saves inside of recomputed parts."""
        self.hidden = self.replayed | _saves_in(whole)
        """These, and saves inside of modules that are recomputed as a whole."""
        self._replays = tuple(sorted((*self.recipes, *whole), key=lambda call: call.end_save))

    @cached_property
    def decided(self) -> dict[str, tuple[str, ...]]:
        """Return the regions that are decided on, by the module that they are of."""
        found: dict[str, tuple[str, ...]] = {}
        for key, decision in self.plan.decisions.items():
            if decision.policy == OFFLOAD:
                fqn = self.graph.by_fqn[key.fqn].fqn
                found[fqn] = (*found.get(fqn, ()), key.region)
        return found

    @cached_property
    def scopes(self) -> tuple[tuple[range, frozenset[int]], ...]:
        """Return the saves of each layer's call, and which storages stand there for recipes."""
        layers = region_layers(self.graph)
        whole = range(len(self.graph.saved))
        outputs: dict[range, set[int]] = {}
        calls = [range(c.first_save, c.end_save) for c in self.graph.calls if c.fqn in layers]
        for recipe in self.recipes:
            around = next((call for call in calls if _is_inside(recipe, call)), whole)
            made = {storage for storage, _ in recipe.outputs} - {storage for storage, _ in recipe.inputs}
            outputs.setdefault(around, set()).update(made)
        return tuple((saves, frozenset(made)) for saves, made in outputs.items())

    @cached_property
    def recipe_saves(self) -> frozenset[int]:
        """Return the saves that are outputs of recomputed parts of the same layer."""
        return frozenset(
            n
            for saves, made in self.scopes
            for n in saves
            if n not in self.hidden and self._source(self.graph.saved[n]) in made
        )

    def _source(self, tensor: SavedTensor) -> int:
        """Return the storage of which a save holds values: under autocast, that which it is a cast of."""
        is_cast = tensor.cast_of is not None and self.graph.input.autocast != "none"
        return tensor.cast_of if is_cast and tensor.cast_of is not None else tensor.storage

    def is_recipe(self, storage: int, at: int) -> bool:
        """Tell whether a storage, met at a place in the sequence of saves, is made again by a part of the same layer."""
        return any(at in saves and storage in made for saves, made in self.scopes)

    def calls(self) -> Iterator[tuple[ModuleCall, list[Entry]]]:
        """Yield the calls of offloaded modules in forward order, each with what it sees."""
        ends: dict[str, int] = {}
        for call in sorted(self.graph.calls, key=lambda call: (call.first_save, call.index)):
            if call.fqn in self.decided and call.first_save >= ends.get(call.fqn, 0):
                ends[call.fqn] = call.end_save
                yield call, self.entries(call, self.decided[call.fqn])

    def entries(self, call: ModuleCall, regions: tuple[str, ...] = ()) -> list[Entry]:
        """Return what a call sees, recipes left out; regions of modules are told apart as far as they are given."""
        seen = list(self._seen_in(call))
        claimed = [region.removeprefix(MODULE) for region in regions if region.startswith(MODULE)]
        paths = {owner: path_in(self.graph, call.fqn, owner) for owner in {one.owner for one, _ in seen}}
        saves = [Save(paths[one.owner], one.tensor.node if one.tensor else "") for one, _ in seen]
        labels = regions_in(saves, claimed)
        fused = FUSED_GROUP_MLP in regions
        return [
            one._replace(group=RegionKey(call.fqn, FUSED_GROUP_MLP if fused and label in FUSED_PARTS else label))
            for (one, recipe), label in zip(seen, labels, strict=True)
            if not recipe
        ]

    def _seen_in(self, call: ModuleCall) -> Iterator[tuple[Entry, bool]]:
        """Yield what a call sees, its group unknown, and whether it is a recipe: these have a place in the order."""
        replays = [replay for replay in self._replays if _is_inside(replay, range(call.first_save, call.end_save))]
        for n in range(call.first_save, call.end_save + 1):
            while replays and replays[0].end_save == n:
                replay = replays.pop(0)
                for storage, size in replay.inputs:
                    yield Entry(storage, size, replay.fqn, None), self.is_recipe(storage, replay.first_save)
            if n < call.end_save and n not in self.hidden:
                t = self.graph.saved[n]
                yield Entry(t.storage, t.storage_bytes, t.owner, t), n in self.recipe_saves


def is_recipe(key: RegionKey, route: str) -> bool:
    """Tell whether the output of what is recomputed is not kept either."""
    return bool(key.region) or route == RECIPE


def _recomputed(plan: Plan, *, as_recipes: bool) -> Iterator[RecipeCall]:
    """Yield the calls of recomputed parts whose outputs are not kept, or of modules that are recomputed as a whole."""
    for key, decision in plan.decisions.items():
        if decision.action is Action.RECOMPUTE and is_recipe(key, decision.route) == as_recipes:
            for fqn, flops, call in _part_calls(plan.graph, key):
                if call.first_save < call.end_save:
                    yield RecipeCall(
                        key=key,
                        fqn=fqn,
                        first_save=call.first_save,
                        end_save=call.end_save,
                        inputs=call.inputs,
                        outputs=call.outputs if as_recipes else (),
                        flops=flops,
                    )


def _part_calls(graph: ModuleGraph, key: RegionKey) -> Iterator[tuple[str, int, ModuleCall | PartCall]]:
    node = graph.by_fqn[key.fqn]
    if key.region:
        yield from (
            (node.fqn, 0, part)
            for part in graph.parts
            if part.region == key.region and graph.calls[part.call].fqn == node.fqn
        )
    else:
        yield from ((node.fqn, call.flops, call) for call in graph.calls_of(node.fqn))


def _saves_in(calls: Iterable[RecipeCall]) -> set[int]:
    return {n for call in calls for n in range(call.first_save, call.end_save)}


def _is_inside(recipe: RecipeCall, saves: range) -> bool:
    return saves.start <= recipe.first_save and recipe.end_save <= saves.stop


def paths_in(graph: ModuleGraph, fqn: str) -> Mapping[str, str]:
    """Return the modules inside another by their path from it, each once."""
    inside = (node.fqn for node in graph.modules if fqn in enclosing(node.fqn) or (not fqn and node.fqn))
    return {name.removeprefix(f"{fqn}.") if fqn else name: name for name in inside}
