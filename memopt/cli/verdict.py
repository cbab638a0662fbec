"""What memopt-apply found out, as a page to read: the verdict first."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memopt.units import format_bytes


def proof_report(values: Mapping[str, Any], *, name: str, num_steps: int, num_faults: int) -> RenderableType:
    """Return the verdict, the two runs side by side, what was copied, and the notes."""
    parts: list[RenderableType] = [verdict(values, num_steps), Text(f"{name}, {num_steps} steps", style="dim"), ""]
    parts += [runs_table(values), "", copies_table(values, num_steps)]
    if values["notes"]:
        parts += ["", notes_table(values["notes"], num_faults)]
    return Group(*parts)


def verdict(values: Mapping[str, Any], num_steps: int) -> Text:
    """Return in one sentence whether the plan changed anything but memory."""
    if values["verified"] is None:
        return Text("Not verified: the plan was run, and compared with nothing.", style="bold yellow")
    if not values["verified"]:
        return Text("NOT EQUAL: the plan does not do what it says; see the notes.", style="bold red")
    exact = values["losses_equal"] and values["gradients_equal"]
    how = "bit for bit" if exact else "within what the run without it differs from itself"
    return Text.assemble(
        ("Verified: ", "bold green"),
        (f"with the plan, {num_steps} steps give the same losses and gradients as without it, {how}.", "bold"),
    )


def runs_table(values: Mapping[str, Any]) -> Table:
    """Return the run without the plan and the run with it side by side."""
    table = _table("", "without the plan", "with the plan")
    seconds, peak = values["step_seconds"], values["peak_device_bytes"]
    table.add_row("seconds a step", _seconds(seconds["baseline"]), _seconds(seconds["planned"]))
    table.add_row("peak device memory", _bytes(peak["baseline"]), _bytes(peak["planned"]))
    return table


def copies_table(values: Mapping[str, Any], num_steps: int) -> Table:
    """Return what the engine counted over all steps, and what the plan foretold."""
    table = _table("all steps", "tensors", "bytes")
    for key, what in (("registered", "registered"), ("copied_out", "copied out"), ("copied_in", "copied back in")):
        table.add_row(what, f"{values[key]['tensors']:,}", format_bytes(values[key]["bytes"]))
    table.add_row("predicted", "", format_bytes(values["predicted_swap_bytes"] * num_steps), style="dim")
    return table


def notes_table(notes: list[str], num_faults: int) -> Table:
    """Return the notes as a list, those that say what is wrong first and in red."""
    table = Table.grid(padding=(0, 1, 0, 0))
    for number, note in enumerate(notes):
        table.add_row("-", Text(note, style="red" if number < num_faults else "dim"))
    return table


def _table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number else "left", min_width=16 if number else 18)
    return table


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _bytes(value: int | None) -> str:
    return "-" if value is None else format_bytes(value)
