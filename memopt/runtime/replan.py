"""Decide anew which parts stay on the device when the shapes of a forward are not those of the plan.

The rules are the plan's own. What they need, how much each layer would move, shows when its first call with new shapes
ends; once the last layer's has, the next forward with these shapes follows the new decisions.
"""

from collections.abc import Iterable, Iterator, Set
from typing import Any

from torch import nn

from memopt.ir.offload import Group
from memopt.ir.offload_rules import kept_groups
from memopt.runtime.module_state import ModuleState, state_of
from memopt.runtime.region import Region, previous_of, region_of
from memopt.runtime.roles import Signature

WHOLE: tuple[Any, ...] = ()
"""In the place of a view's geometry: all of the storage."""
Sizes = dict[tuple[int, tuple[Any, ...]], int]
"""The bytes of copies by storage and view of it: what several layers save, as a mask, moves once."""


def decide_anew(module: nn.Module, signature: Signature, sizes: dict[str, Sizes]) -> None:
    """Note what a layer would move of each part; behind the last layer, decide for all of them.

    Only if all of them have learned since the last decision: what the others know is of other shapes.
    """
    state = state_of(module)
    state.sizes = signature, sizes
    region = region_of(module)
    if region is None or region.offload is None or not region.is_last:
        return
    chain = list(_chain(module))[::-1]
    layers = [(layer, known, *learned) for layer, known in chain if (learned := known.sizes)]
    if len(layers) < len(chain):
        return
    groups = list(_groups((layer, own) for layer, _, _, own in layers))
    kept = {groups[n][:2] for n in kept_groups(groups, region.offload)}
    for layer, known, key, own in layers:
        known.sizes = None
        swapped = frozenset(part for part in layer.offloadable if (layer.fqn, part) not in kept)
        _follow(known, key, {part for part, copies in own.items() if copies}, swapped, layer.swapped)


def _groups(layers: Iterable[tuple[Region, dict[str, Sizes]]]) -> Iterator[Group]:
    """Yield what each part of some layers would move, given in forward order, that no earlier one would."""
    moved: set[tuple[int, tuple[Any, ...]]] = set()
    for layer, sizes in layers:
        for part in layer.offloadable:
            own = sizes.get(part, {})
            new = (size for copy, size in own.items() if copy not in moved and (copy[0], WHOLE) not in moved)
            yield Group(layer.fqn, part, sum(new))
            moved |= own.keys()


def _follow(
    state: ModuleState, signature: Signature, present: Set[str], swapped: frozenset[str], planned: frozenset[str]
) -> None:
    """Let the calls with the signature that a layer has just learned follow a decision."""
    if swapped & present != state.swapped.get(signature, planned) & present:
        state.swapped[signature] = swapped
        state.tables.pop(signature, None)  # what it says of each save is of before


def _chain(module: nn.Module | None) -> Iterator[tuple[Region, ModuleState]]:
    """Yield the layers of parts from the last to the first."""
    while module is not None:
        region = region_of(module)
        if region is not None and region.collects:
            yield region, state_of(module)
        module = previous_of(module)
