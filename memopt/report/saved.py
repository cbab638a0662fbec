"""Where the activations of the whole model are saved, by class of module."""

from rich import box
from rich.console import RenderableType
from rich.table import Table

from memopt.ir import Kind, ModuleGraph, saved_bytes
from memopt.units import format_bytes, mib_text

NUM_ROWS = 8


def saved_table(graph: ModuleGraph) -> RenderableType:
    """Return the largest savers and the sum, each storage where it is first saved."""
    classes = activations_by_class(graph)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), show_footer=True)
    table.add_column("saved by", footer="all")
    table.add_column("tensors", justify="right", footer=f"{sum(count for count, _ in classes.values()):,}")
    total = sum(size for _, size in classes.values())
    table.add_column("MiB", justify="right", footer=mib_text(total))
    for name, (count, size) in _largest(classes):
        table.add_row(name, f"{count:,}", mib_text(size))
    return table


def weights_sentence(graph: ModuleGraph) -> str:
    """Return that saved weights are no extra memory; empty where none are."""
    weights = saved_bytes(graph.saved).parameter_bytes
    if not weights:
        return ""
    return f"Backward also reads {format_bytes(weights)} of weights and buffers, which are there anyway."


def activations_by_class(graph: ModuleGraph) -> dict[str, tuple[int, int]]:
    """Return (storages, bytes) by the class of the module that saves them first, the largest first."""
    classes: dict[str, tuple[int, int]] = {}
    seen = {tensor.storage for tensor in graph.saved if tensor.kind in (Kind.PARAMETER, Kind.BUFFER)}
    for tensor in graph.saved:
        if tensor.storage in seen:
            continue
        seen.add(tensor.storage)
        name = graph.by_fqn[tensor.owner].class_name
        count, size = classes.get(name, (0, 0))
        classes[name] = (count + 1, size + tensor.storage_bytes)
    return dict(sorted(classes.items(), key=lambda item: (-item[1][1], item[0])))


def _largest(classes: dict[str, tuple[int, int]]) -> list[tuple[str, tuple[int, int]]]:
    """Return the largest classes, and what is left as one row."""
    rows = list(classes.items())
    if len(rows) <= NUM_ROWS:
        return rows
    rest = [numbers for _, numbers in rows[NUM_ROWS - 1 :]]
    others = (sum(count for count, _ in rest), sum(size for _, size in rest))
    return [*rows[: NUM_ROWS - 1], (f"{len(rest)} other classes", others)]
