"""What recomputing means: in sum, and for each kind of module."""

from collections.abc import Iterable, Iterator

from rich import box
from rich.table import Table

from memopt.ir import PlanAccount, RecomputeAccount
from memopt.report.folding import Fold
from memopt.report.rows import Row
from memopt.units import count_noun, format_bytes, format_flops, mib_text


def recompute_sums(totals: PlanAccount, activation_bytes: int) -> Iterator[tuple[str, str, str]]:
    """Yield (what, how much, meaning) of everything that is recomputed; what is nothing is left out.

    What bears a sign leads from the first row to the one without.
    """
    targets = [target for target in totals.targets if target.recompute]
    if not targets:
        return
    freed = sum(target.freed_bytes for target in targets)
    where = f"in {count_noun(len(targets), 'module')}{_routes(totals)}"
    yield "saved without the plan", format_bytes(activation_bytes), "all activations that wait for backward"
    if swapped := totals.freed_bytes - freed:
        yield "freed by swap", f"-{format_bytes(swapped)}", "see above"
    yield "dropped after forward", f"-{format_bytes(totals.dropped_bytes)}", where
    if held := totals.dropped_bytes - freed:
        yield "dropped, but not freed", f"+{format_bytes(held)}", "something else holds it on the device"
    if totals.added_bytes:
        yield "newly held", f"+{format_bytes(totals.added_bytes)}", "for the replay, and free without the plan"
    left = activation_bytes - totals.net_freed_bytes
    yield "left with the plan", format_bytes(left), "on the device between forward and backward"
    yield "", "", ""
    swap = ", less what swap frees" if swapped else ""
    yield "really freed", format_bytes(freed - totals.added_bytes), f"saved without the plan, less what is left{swap}"
    if totals.input_bytes:
        yield (
            "held for the replay",
            format_bytes(totals.input_bytes),
            "what modules are called with, partly saved anyway",
        )
    if totals.result_bytes:
        yield "kept results", format_bytes(totals.result_bytes), "and the last saves, partly saved anyway"
    yield "back during a replay", format_bytes(totals.replay_bytes), "at most, while one module is run again"
    if totals.flops:
        yield "run a second time", format_flops(totals.repeated_flops), repeated_text(totals)


def _routes(totals: PlanAccount) -> str:
    """Return by which ways the modules came to be recomputed: ``, by the native route``."""
    routes = dict.fromkeys(target.recompute.route for target in totals.targets if target.recompute)
    names = [route for route in routes if route]
    return f", by the {' and the '.join(names)} route" if names else ""


def repeated_text(totals: PlanAccount) -> str:
    """Return which share of the forward's operations is run twice; only where they are known."""
    return f"{totals.repeated_flops / totals.flops:.0%} of the forward's {format_flops(totals.flops)}"


def way_text(account: RecomputeAccount | None) -> str:
    """Return how a module is recomputed, empty for one that is not: `` by the native route, policy full``."""
    if account is None:
        return ""
    return f" by the {account.route} route, policy {account.policy}" if account.route else f", policy {account.policy}"


def recompute_table(fold: Fold) -> Table:
    """Return what one of a fold's modules drops, holds, keeps and runs again."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("each" if len(fold.targets) > 1 else "", no_wrap=True)
    table.add_column("MiB", justify="right", no_wrap=True)
    table.add_column("of", overflow="fold")
    for what, num_bytes, of in _saved(fold):
        table.add_row(what, mib_text(num_bytes), of)
    table.add_section()
    table.add_row(
        "saved in all", mib_text(sum(row.storage_bytes for row in fold.rows)), "without the plan", style="bold"
    )
    table.add_section()
    if held := tuple(_held(fold)):
        for what, num_bytes, of in held:
            table.add_row(what, mib_text(num_bytes), of)
        table.add_section()
    target = fold.targets[0]
    table.add_row("freed", mib_text(target.freed_bytes), "what it drops and nothing else holds", style="bold")
    if (account := target.recompute) and account.flops:
        share = f"{format_flops(account.repeated_flops)} of {format_flops(account.flops)}"
        table.add_row("run a second time", "", share)
    return table


def _saved(fold: Fold) -> Iterator[tuple[str, int, str]]:
    """Yield (what, bytes, of what): the saved tensors by what becomes of them."""
    yield from _saved_rows("saved and dropped", (row for row in fold.rows if row.covered))
    yield from _saved_rows("saved and kept", (row for row in fold.rows if not row.covered))


def _held(fold: Fold) -> Iterator[tuple[str, int, str]]:
    """Yield (what, bytes, of what): what is held for the replay, saved without the plan or not."""
    account = fold.targets[0].recompute
    if account is None:
        return
    if account.input_bytes:
        yield "held for the replay", account.input_bytes, "what it is called with"
    for kept in account.results:
        yield "results kept", kept.num_bytes, f"{count_noun(kept.num_calls, 'call')} of {kept.family.value}"
    if account.last_bytes:
        yield "results kept", account.last_bytes, "tensors that are saved last"


def _saved_rows(what: str, rows: Iterable[Row]) -> Iterator[tuple[str, int, str]]:
    """Yield a row for each reason, the rows of a reason added up."""
    reasons: dict[str, list[int]] = {}
    for row in rows:
        reasons.setdefault(row.reason, []).append(row.storage_bytes)
    for reason, sizes in sorted(reasons.items()):
        yield what, sum(sizes), f"{count_noun(len(sizes), 'tensor')}: {reason}"
