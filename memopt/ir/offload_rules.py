"""Which groups stay on the device, and why: margin, pipeline delta, fraction, in this order.

Source: the planning rules of Megatron-LM's fine-grained activation offloading, its fraction rounded exactly.
"""

from collections.abc import Sequence
from fractions import Fraction

from memopt.ir.offload import Group, Offload
from memopt.ir.regions import MODULE
from memopt.units import format_bytes

MARGIN, PIPELINE, FRACTION = "margin", "pipeline", "fraction"
"""What the reason of each rule begins with, up to a colon."""


def kept_groups(groups: Sequence[Group], settings: Offload) -> dict[int, str]:
    """Return which of some groups, given in forward order, stay on the device: their index, and why.

    A group that has nothing to offload is in no rule.
    """
    kept: dict[int, str] = {}
    for rule in (_margin, _pipeline, _fraction):
        left = {n: group for n, group in enumerate(groups) if group.num_bytes and n not in kept}
        kept |= rule(left, settings)
    return dict(sorted(kept.items()))


def group_name(fqn: str, region: str) -> str:
    """Return what groups of several layers have in common: the region, of a module its name with stars for numbers."""
    if region != MODULE:
        return region
    return MODULE + ".".join("*" if part.isdecimal() else part for part in fqn.split("."))


def num_dropped(num_groups: int, fraction: float) -> int:
    """Return how many of some groups stay so that a fraction leaves, the number taken as it is written: 0.9 is 9/10."""
    return int(num_groups * (1 - Fraction(str(fraction))))


def _margin(groups: dict[int, Group], settings: Offload) -> dict[int, str]:
    """Keep the last groups: they would go out and come straight back."""
    if settings.margin == "auto":
        last = {group_name(group.fqn, group.region): n for n, group in groups.items()}
        return {n: f"{MARGIN}: the last {region} would come straight back" for region, n in last.items()}
    budget, kept = settings.margin, {}
    for n, group in reversed(groups.items()):
        if group.num_bytes > budget:
            break
        budget -= group.num_bytes
        kept[n] = f"{MARGIN}: within the last {format_bytes(settings.margin)}, which would come straight back"
    return kept


def _pipeline(groups: dict[int, Group], settings: Offload) -> dict[int, str]:
    """Keep the first groups of a later stage, which has fewer microbatches in flight."""
    budget = asked = settings.pp_rank * settings.pp_rank_delta_bytes
    kept = {}
    for n, group in groups.items():
        if budget <= 0:
            break
        budget -= group.num_bytes
        kept[n] = f"{PIPELINE}: rank {settings.pp_rank} keeps the first {format_bytes(asked)}"
    return kept


def _fraction(groups: dict[int, Group], settings: Offload) -> dict[int, str]:
    """Keep the last of the groups that are left: what was saved first lives longest."""
    stay = num_dropped(len(groups), settings.fraction)
    why = f"{FRACTION}: {settings.fraction:g} of {len(groups)} groups leave"
    return dict.fromkeys(list(groups)[len(groups) - stay :], why)
