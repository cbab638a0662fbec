"""The tensors of a target, what each does and why; targets that are equal are one table."""

from collections.abc import Iterable

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memopt.ir import Action
from memopt.report.folding import Fold
from memopt.report.recompute import recompute_table, way_text
from memopt.report.rows import SAME_STORAGE, Row, shape_text
from memopt.units import mib_text

STYLES = {Action.SWAP: "green", Action.RECOMPUTE: "green", Action.KEEP: "yellow"}


def target_tables(folds: Iterable[Fold]) -> RenderableType:
    """Return a table a fold; one that saves the same tensors as an earlier one refers to its table."""
    shown: dict[object, Fold] = {}
    parts: list[RenderableType] = []
    for fold in folds:
        parts += ["", *title(fold)]
        if fold.targets[0].recompute:
            parts += ["", recompute_table(fold)]
            continue
        like = shown.setdefault(fold.tensors, fold)
        parts += ["", tensor_table(fold)] if like is fold else [reference(fold, like)]
    return Group(*parts[1:])


def title(fold: Fold) -> tuple[Text, Text]:
    """Return which modules a table is about, and what was decided on them."""
    target = fold.targets[0]
    style = f"bold {STYLES[target.action]}"
    return (
        Text.assemble((fold.name, "bold"), "  ", (target.class_name, "dim")),
        Text.assemble((target.action.value, style), f"{way_text(target.recompute)}: {target.why}"),
    )


def reference(fold: Fold, like: Fold) -> Text:
    """Return that the tensors are those of an earlier table."""
    covered = mib_text(fold.targets[0].covered_bytes)
    return Text(f"the same tensors as {like.name}: {covered} MiB{_each(fold)} pass the policy", style="dim")


def tensor_table(fold: Fold) -> Table:
    """Return a row a storage that the policy passes, their sum, then a row a reason for what it keeps."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("tensor", overflow="fold")
    table.add_column("op", overflow="fold")
    table.add_column("shape", no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    table.add_column("MiB", justify="right", no_wrap=True)
    table.add_column("action", no_wrap=True)
    table.add_column("why", no_wrap=True)
    for row in fold.rows:
        if row.covered:
            _add_row(table, row)
    covered = mib_text(fold.targets[0].covered_bytes)
    table.add_section()
    table.add_row(f"covered{_each(fold)}", "", "", "", covered, style="bold", end_section=True)
    for reason, sizes in sorted(_kept(fold.rows).items()):
        count = f"{len(sizes)} tensor{'s' * (len(sizes) > 1)}"
        table.add_row(count, "", "", "", mib_text(sum(sizes)), _action(Action.KEEP), reason)
    return table


def _add_row(table: Table, row: Row) -> None:
    """Add a storage, and below it the further tensors that share it."""
    (tensor, op), *others = row.saves
    sizes = shape_text(row.shape), row.dtype, mib_text(row.storage_bytes)
    table.add_row(tensor, op, *sizes, _action(row.action), row.reason)
    for tensor, op in others:
        table.add_row(tensor, op, "", "", "", "", SAME_STORAGE, style="dim")


def _kept(rows: Iterable[Row]) -> dict[str, list[int]]:
    """Return the sizes of the storages that the policy keeps, by reason."""
    reasons: dict[str, list[int]] = {}
    for row in rows:
        if not row.covered:
            reasons.setdefault(row.reason, []).append(row.storage_bytes)
    return reasons


def _action(action: Action) -> Text:
    return Text(action.value, style=STYLES[action])


def _each(fold: Fold) -> str:
    return " each" if len(fold.targets) > 1 else ""
