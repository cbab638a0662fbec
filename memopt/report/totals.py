"""The sums over all targets, and what copying them takes."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table

from memopt.ir import Action, PlanAccount
from memopt.report.offload import offload_sums
from memopt.report.recompute import recompute_sums
from memopt.units import count_noun, format_bytes

COPY_GB_PER_SECOND = 55
"""Pinned host memory to or from one H200 over PCIe 5 x16, one way at a time, measured."""


def totals_table(totals: PlanAccount, activation_bytes: int) -> RenderableType:
    """Return the sums, each with what it means, for a model whose forward saves so many bytes of activations."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True, style="bold")
    table.add_column(style="dim")
    swaps = any(target.recompute is None for target in totals.targets)
    rows = (*(_sums(totals) if swaps else ()), *recompute_sums(totals, activation_bytes))
    if totals.offload:
        rows = tuple(offload_sums(totals, totals.offload))
    for what, amount, meaning in rows:
        table.add_row(what, amount, meaning)
    return table


def copy_sentence(totals: PlanAccount) -> str:
    """Return how long the copies take, and on which assumption."""
    milliseconds = totals.swap_bytes / (COPY_GB_PER_SECOND * 10**6)
    return (
        f"About {milliseconds:,.1f} ms out during forward and as long back during backward, at "
        f"{COPY_GB_PER_SECOND} GB/s one way: measured on PCIe 5 x16, assumed for your machine. "
        "Copies run beside the computation and cost time only where they take longer than it."
    )


def _sums(totals: PlanAccount) -> Iterator[tuple[str, str, str]]:
    """Yield (what, how much, meaning) of a swap; what is nothing is left out."""
    targets = [target for target in totals.targets if target.recompute is None]
    freed = sum(target.freed_bytes for target in targets)
    swapped = sum(target.action is Action.SWAP for target in targets)
    copied = f"{count_noun(totals.num_tensors, 'tensor')} of {count_noun(swapped, 'module')}"
    yield "covered by the policy", format_bytes(totals.covered_bytes), f"in {count_noun(len(targets), 'module')}"
    if margin := totals.covered_bytes - totals.swap_bytes:
        yield "stays on as margin", format_bytes(margin), "it would go out and come straight back"
    yield "copied out and back a step", format_bytes(totals.swap_bytes), copied
    if held := totals.swap_bytes - freed:
        yield "copied, but not freed", format_bytes(held), "something else holds it on the device"
    yield "really freed", format_bytes(freed), "off the device between forward and backward"
