"""What memopt-apply found out, as a page to read: the verdict first."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memopt.units import count_noun, format_bytes

if TYPE_CHECKING:
    from memopt.cli.proof import Proof


def proof_report(proof: "Proof", *, name: str, num_steps: int) -> RenderableType:
    """Return the verdict, the two runs side by side, what was copied or replayed, and the notes."""
    values = proof.values
    size = Text(f"{name}, {count_noun(num_steps, 'step')}", style="dim")
    parts: list[RenderableType] = [verdict(proof, num_steps), size, ""]
    parts.append(runs_table(values))
    if values["predicted_swap_bytes"] or "replays" not in values:
        parts += ["", copies_table(values, num_steps)]
    if "replays" in values:
        parts += ["", replays_table(values["replays"], num_steps)]
    if values["notes"]:
        parts += ["", notes_table(values["notes"], len(proof.faults))]
    return Group(*parts)


def verdict(proof: "Proof", num_steps: int) -> Text:
    """Return in one sentence whether the plan changed anything but memory."""
    if proof.values["verified"] is None:
        return Text("Not verified: the plan was run, and compared with nothing.", style="bold yellow")
    if proof.differences:
        return Text("NOT EQUAL: with the plan the model trains differently; see the notes.", style="bold red")
    how = _how_equal(proof.values)
    if proof.contradictions:
        reason = "; ".join(proof.contradictions)
        return Text(f"NOT VERIFIED: {reason}. Losses and gradients are the same, {how}.", style="bold red")
    gives = f"with the plan, {count_noun(num_steps, 'step')} give{'s' * (num_steps == 1)}"
    unchecked = "" if proof.predicted else " (predicted bytes not compared)"
    return Text.assemble(
        ("Verified: ", "bold green"),
        (f"{gives} the same losses and gradients as without it, {how}{unchecked}.", "bold"),
    )


def _how_equal(values: Mapping[str, Any]) -> str:
    exact = values["losses_equal"] and values["gradients_equal"]
    return "bit for bit" if exact else "within what the run without it differs from itself"


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


def replays_table(replays: Mapping[str, int], num_steps: int) -> Table:
    """Return what was recomputed over all steps, and what the plan foretold."""
    table = _table("all steps", "calls", "bytes")
    table.add_row("checkpointed", f"{replays['checkpointed_calls']:,}", "")
    table.add_row("replayed", f"{replays['replayed_calls']:,}", "")
    table.add_row("kept results", "", format_bytes(replays["kept_results_bytes"]))
    calls, kept = replays["predicted_calls"] * num_steps, replays["predicted_kept_results_bytes"] * num_steps
    table.add_row("predicted", f"{calls:,}", format_bytes(kept), style="dim")
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
