"""Decide anew which parts stay on the device when the shapes of a forward are not those of the plan.

The rules are the plan's own. What they need, how much each layer would move, shows when its first call with new shapes
ends; once the last layer's has, the next forward with these shapes follows the new decisions.
"""

from collections.abc import Iterator

from torch import nn

from memopt.ir.offload import Group
from memopt.ir.offload_rules import kept_groups
from memopt.runtime.module_state import ModuleState, state_of
from memopt.runtime.region import Region, previous_of, region_of
from memopt.runtime.roles import Signature


def decide_anew(module: nn.Module, signature: Signature, sizes: dict[str, int]) -> None:
    """Note what a layer would move of each part; behind the last layer, decide for all of them."""
    state = state_of(module)
    state.sizes = signature, sizes
    region = region_of(module)
    if region is None or region.offload is None or not region.is_last:
        return
    layers = list(_chain(module))[::-1]
    groups = [
        Group(layer.fqn, part, known.sizes[1].get(part, 0))
        for layer, known in layers
        if known.sizes is not None
        for part in layer.offloadable
    ]
    kept = {groups[n][:2] for n in kept_groups(groups, region.offload)}
    for layer, known in layers:
        _follow(known, frozenset(part for part in layer.offloadable if (layer.fqn, part) not in kept), layer)


def _follow(state: ModuleState, swapped: frozenset[str], region: Region) -> None:
    """Let the calls with a layer's last learned signature follow a decision."""
    if state.sizes is None:
        return
    signature, sizes = state.sizes
    present = {part for part, size in sizes.items() if size}
    if swapped & present != state.swapped.get(signature, region.swapped) & present:
        state.swapped[signature] = swapped
        state.tables.pop(signature, None)  # what it says of each save is of before


def _chain(module: nn.Module | None) -> Iterator[tuple[Region, ModuleState]]:
    """Yield the layers of parts from the last to the first."""
    while module is not None:
        region = region_of(module)
        if region is not None and region.collects:
            yield region, state_of(module)
        module = previous_of(module)
