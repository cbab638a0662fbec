"""What offloading regions and recomputing parts means: in sum, by region, by layer, and what stays."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table

from memopt.ir import Action, GroupAccount, LayerShare, OffloadAccount, PlanAccount, RecipeAccount, group_name
from memopt.ir.offload_fates import UNDER
from memopt.ir.offload_rules import FRACTION, MARGIN, PIPELINE
from memopt.report.folding import folded_name, split_number
from memopt.report.recompute import repeated_text
from memopt.units import count_noun, format_bytes, format_flops, mib_text

_THERE_ANYWAY = ("parameter", "buffer")
_RULES = {PIPELINE: "pp_rank_delta_bytes", FRACTION: "fraction"}


@dataclass(slots=True)
class RegionRow:
    """All groups of one region."""

    region: str
    num_groups: int = 0
    num_offloaded: int = 0
    num_tensors: int = 0
    moved_bytes: int = 0
    duplicate_bytes: int = 0
    kept: dict[str, int] = field(default_factory=dict)
    """Bytes by reason."""


@dataclass(slots=True)
class RecomputeRow:
    """All parts of one name that are recomputed."""

    name: str
    num_parts: int = 0
    num_calls: int = 0
    dropped_bytes: int = 0
    output_bytes: int = 0
    input_bytes: int = 0


def region_rows(groups: Iterable[GroupAccount]) -> tuple[RegionRow, ...]:
    """Add up groups by region, in forward order."""
    rows: dict[str, RegionRow] = {}
    for group in groups:
        name = group_name(group.key.fqn, group.key.region)
        row = rows.setdefault(name, RegionRow(name))
        row.num_groups += 1
        row.num_offloaded += group.action is Action.SWAP
        row.num_tensors += group.num_tensors
        row.moved_bytes += group.moved_bytes
        row.duplicate_bytes += group.duplicate_bytes
        for reason, size in group.kept:
            if reason not in _THERE_ANYWAY:
                row.kept[reason] = row.kept.get(reason, 0) + size
    return tuple(rows.values())


def recompute_rows(recipes: Iterable[RecipeAccount]) -> tuple[RecomputeRow, ...]:
    """Add up recomputed parts by the name that they were asked for by."""
    rows: dict[str, RecomputeRow] = {}
    for recipe in recipes:
        name = recipe.why.partition(":")[0]
        row = rows.setdefault(name, RecomputeRow(name))
        row.num_parts += 1
        row.num_calls += recipe.num_calls
        row.dropped_bytes += recipe.dropped_bytes
        row.output_bytes += recipe.output_bytes
        row.input_bytes += recipe.input_bytes
    return tuple(rows.values())


def offload_subject(totals: PlanAccount) -> str:
    """Return what frees memory."""
    recomputes = bool(totals.offload and totals.offload.recipes) or bool(totals.targets)
    if not totals.swap_bytes:
        return "Recompute"
    return "Offload with recompute" if recomputes else "Offload"


def why_nothing(account: OffloadAccount) -> str:
    """Return for what reason most of the groups' bytes stay."""
    kept = [item for row in region_rows(account.groups) for item in row.kept.items()]
    reason = max(kept, key=lambda item: item[1])[0] if kept else "nothing is saved in these groups"
    if reason == MARGIN:
        return f"all that could be is {MARGIN}, and margin: 0 offloads it"
    if reason.startswith(UNDER):
        return f"most of what could be is {reason}, and a smaller min_tensor_elements offloads that"
    return f"most of what could be stays by {_RULES[reason]}" if reason in _RULES else reason


def offloads_nothing(totals: PlanAccount) -> str:
    """Return why a plan that is to offload moves nothing; empty if it moves something, or is not asked to."""
    if not totals.offload or not totals.offload.groups or totals.offload.moved_bytes:
        return ""
    return f"nothing is offloaded: {why_nothing(totals.offload)}"


def offload_sums(totals: PlanAccount, account: OffloadAccount) -> Iterator[tuple[str, str, str]]:
    """Yield (what, how much, meaning); what bears a sign leads from the first row to the one without."""
    yield "saved without the plan", format_bytes(account.saved_bytes), "all activations that wait for backward"
    if account.moved_freed_bytes:
        yield "freed by offload", f"-{format_bytes(account.moved_freed_bytes)}", "it waits in pinned host memory"
    if made := account.freed_bytes - account.moved_freed_bytes:
        yield "made again in backward", f"-{format_bytes(made)}", "inside of recomputed parts, and their outputs"
    if account.added_bytes:
        yield "newly held", f"+{format_bytes(account.added_bytes)}", "for the replay, and free without the plan"
    left = account.saved_bytes - totals.net_freed_bytes
    yield "left with the plan", format_bytes(left), "on the device between forward and backward"
    yield "", "", ""
    swapped = sum(bool(group.moved_bytes) for group in account.groups)
    copied = f"{count_noun(totals.num_tensors, 'tensor')} of {count_noun(swapped, 'group')}"
    if account.groups:
        yield "copied out and back a step", format_bytes(totals.swap_bytes), copied
    if account.duplicate_bytes:
        yield "duplicates avoided", format_bytes(account.duplicate_bytes), "saved again, and copied once"
    if totals.replay_bytes:
        yield "back during a replay", format_bytes(totals.replay_bytes), "at most, while one part is run again"
    if totals.repeated_flops:
        yield "run a second time", format_flops(totals.repeated_flops), repeated_text(totals)


def offload_tables(account: OffloadAccount) -> Iterator[tuple[str, RenderableType]]:
    """Yield (title, table) of the regions, the recomputed parts, the layers, and what stays."""
    if account.groups:
        yield "Offload", _region_table(region_rows(account.groups), account)
    if account.recipes:
        yield "Recompute", _recompute_table(recompute_rows(account.recipes))
    if account.layers:
        yield "Share that leaves the device", _share_table(account)
    yield "What stays on the device", _stays_table(account.stays)


def _region_table(rows: Iterable[RegionRow], account: OffloadAccount) -> Table:
    table = _table("region", "groups", "tensors", "MiB offloaded", "duplicates", "MiB kept", "why", last="left")
    for row in rows:
        kept = sorted(row.kept.items(), key=lambda item: (-item[1], item[0])) or [("", 0)]
        for number, (reason, size) in enumerate(kept):
            cells = [row.region, f"{row.num_groups:,}", f"{row.num_tensors:,}"]
            cells += [mib_text(row.moved_bytes), mib_text(row.duplicate_bytes)]
            table.add_row(*(cells if not number else [""] * 5), mib_text(size) if reason else "", reason)
    table.add_section()
    sums = [mib_text(account.moved_bytes), mib_text(account.duplicate_bytes)]
    table.add_row("all", f"{len(account.groups):,}", f"{account.num_tensors:,}", *sums, "", "", style="bold")
    return table


def _recompute_table(rows: Iterable[RecomputeRow]) -> Table:
    table = _table("recomputed", "parts", "calls", "MiB dropped", "outputs not kept", "inputs")
    for row in rows:
        sizes = (row.dropped_bytes, row.output_bytes, row.input_bytes)
        table.add_row(row.name, f"{row.num_parts:,}", f"{row.num_calls:,}", *map(mib_text, sizes))
    return table


def _share_table(account: OffloadAccount) -> Table:
    table = _table("of what is saved in", "MiB saved", "MiB gone", "share")
    for shares in _fold(account.layers):
        first = shares[0]
        _add_share(table, folded_name([share.fqn for share in shares]), first.saved_bytes, first.gone_bytes)
    table.add_section()
    _add_share(table, "the whole model", account.saved_bytes, account.freed_bytes)
    return table


def _add_share(table: Table, name: str, saved: int, gone: int) -> None:
    table.add_row(name, mib_text(saved), mib_text(gone), f"{gone / saved:.1%}" if saved else "")


def _fold(layers: Iterable[LayerShare]) -> Iterable[list[LayerShare]]:
    """Return the layers of which as much leaves together."""
    folds: dict[tuple[str, str, int, int], list[LayerShare]] = {}
    for share in layers:
        before, _, after = split_number(share.fqn)
        folds.setdefault((before, after, share.saved_bytes, share.gone_bytes), []).append(share)
    return folds.values()


def _stays_table(stays: Iterable[tuple[str, int]]) -> Table:
    table = _table("why", "MiB")
    for reason, size in stays:
        table.add_row(reason, mib_text(size))
    table.add_section()
    table.add_row("all", mib_text(sum(size for _, size in stays)), style="bold")
    return table


def _table(first: str, *titles: str, last: str = "right") -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, overflow="fold")
    for title in titles:
        left = title is titles[-1] and last == "left"
        table.add_column(title, justify="left" if left else "right", overflow="fold")
    return table


def offload_values(totals: PlanAccount, account: OffloadAccount) -> dict[str, Any]:
    """Return the same as plain values for JSON."""
    return {
        "saved_bytes": account.saved_bytes,
        "moved_bytes": account.moved_bytes,
        "num_tensors": account.num_tensors,
        "duplicate_bytes": account.duplicate_bytes,
        "freed_bytes": account.freed_bytes,
        "added_bytes": account.added_bytes,
        "net_freed_bytes": totals.net_freed_bytes,
        "regions": [asdict(row) for row in region_rows(account.groups)],
        "groups": [_group(group) for group in account.groups],
        "recompute": [asdict(row) for row in recompute_rows(account.recipes)],
        "layers": [asdict(share) for share in account.layers],
        "stays": dict(account.stays),
    }


def _group(group: GroupAccount) -> dict[str, Any]:
    return {
        "fqn": group.key.fqn,
        "region": group.key.region,
        "action": group.action.value,
        "why": group.why,
        "num_tensors": group.num_tensors,
        "moved_bytes": group.moved_bytes,
        "duplicate_bytes": group.duplicate_bytes,
        "kept": dict(group.kept),
    }
