"""What a request for offload means in a model: groups of layers by name, modules by pattern."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from memopt.errors import IncompatibleError, UnmatchedPatternError
from memopt.ir.graph import ModuleGraph
from memopt.ir.layers import outermost_of
from memopt.ir.plan import Action, Plan, RegionKey, enclosing
from memopt.ir.region_groups import Seen, is_recipe
from memopt.ir.region_search import region_layers
from memopt.ir.regions import ALL_REGIONS, MODULE, REGIONS


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was asked for and is there."""

    keys: dict[RegionKey, str]
    """With what it is, for the decision's why."""
    missing: tuple[str, ...]
    """Regions that no layer has."""
    has: tuple[str, ...]
    """Regions that some layer has."""


def find_groups(plan: Plan, names: Sequence[str]) -> Found:
    """Return the groups that names and patterns stand for, as far as recomputed parts leave something of them.

    Raises UnmatchedPatternError, and IncompatibleError for a pattern that takes whole layers beside named regions, or
    for a region of which a module that is recomputed as a whole leaves nothing.
    """
    named = tuple(name for name in names if not name.startswith(MODULE))
    keys = _matches(plan.graph, [name for name in names if name.startswith(MODULE)], beside=named)
    claimed = _by_module(keys)
    labels: dict[RegionKey, None] = {}
    if named:
        labels = _labels(plan, named, claimed)
        present = {key.region for key in labels}
        missing = [name for name in named if name not in present]
        whole = _without_whole(plan, named, claimed) if missing else set()
        if lost := [name for name in missing if name in whole]:
            raise IncompatibleError(
                f"what is recomputed leaves nothing saved to offload in {' and '.join(lost)}; drop one"
            )
    has = {key.region for key in (labels or _labels(plan, (), {}))}
    groups = {key: _meaning(key.region) for key in labels if key.region in named}
    return Found(
        keys=groups | keys,
        missing=tuple(name for name in named if name not in has),
        has=tuple(region for region in ALL_REGIONS if region in has),
    )


def _meaning(region: str) -> str:
    return REGIONS.get(region, "the whole block of experts")


def _without_whole(plan: Plan, named: tuple[str, ...], claimed: dict[str, tuple[str, ...]]) -> set[str]:
    """Return the regions that there are without the modules that are recomputed as a whole."""
    parts = {
        key: decision
        for key, decision in plan.decisions.items()
        if decision.action is not Action.RECOMPUTE or is_recipe(key, decision.route)
    }
    if len(parts) == len(plan.decisions):
        return set()
    return {key.region for key in _labels(replace(plan, decisions=parts, prefetch_chain=()), named, claimed)}


def _labels(plan: Plan, named: tuple[str, ...], claimed: dict[str, tuple[str, ...]]) -> dict[RegionKey, None]:
    """Return the groups that the layers have, whatever is asked for, in forward order."""
    seen, layers = Seen(plan), frozenset(region_layers(plan.graph))
    found: dict[RegionKey, None] = {}
    for call in plan.graph.calls:
        if call.fqn in layers:
            entries = seen.entries(call, (*named, *claimed.get(call.fqn, ())))
            found |= dict.fromkeys(entry.group for entry in entries if entry.group.region)
    return found


def _matches(graph: ModuleGraph, patterns: Iterable[str], *, beside: Sequence[str]) -> dict[RegionKey, str]:
    """Return the outermost modules that patterns match, of those that are called and save something."""
    saving = {call.fqn: None for call in graph.calls if call.fqn and call.first_save < call.end_save}
    found: dict[str, str] = {}
    for pattern in patterns:
        names = pattern.removeprefix(MODULE)
        hits = [fqn for fqn in saving if any(fnmatchcase(name, names) for name in graph.by_fqn[fqn].fqns)]
        if not hits:
            raise UnmatchedPatternError(pattern, names, saving)
        found |= {fqn: f"matches {pattern}" for fqn in hits if fqn not in found}
    layers = region_layers(graph) if beside else ()
    return {_key(fqn, layers, found[fqn], beside): found[fqn] for fqn in outermost_of(graph, found)}


def _key(fqn: str, layers: tuple[str, ...], why: str, beside: Sequence[str]) -> RegionKey:
    """Return the key of a match: inside of its layer where regions are named beside it."""
    around = enclosing(fqn)
    for layer in layers:
        if fqn == layer or fqn in enclosing(layer):
            pattern = why.removeprefix("matches ")
            raise IncompatibleError(
                f"{pattern} takes {fqn!r} as a whole, and {' and '.join(beside)} with it: drop the pattern or the regions"
            )
        if layer in around:
            return RegionKey(layer, MODULE + fqn.removeprefix(f"{layer}."))
    return RegionKey(fqn, MODULE)


def _by_module(keys: Iterable[RegionKey]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for key in keys:
        found[key.fqn] = (*found.get(key.fqn, ()), key.region)
    return found
