"""What a training step takes of the device's memory: what for, where its peak stands, and whether it fits."""

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memopt.ir import Memory, Moment, Phase, StepMemory, Use
from memopt.report.places import place_text
from memopt.units import format_bytes

MEASURED, FROM_DATA_SHEETS = "measured", "from data sheets"


def memory_table(memory: Memory) -> Table:
    """Return the bytes for each use at the peak, without the plan and with it; the most ever where that is more."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("at the peak", no_wrap=True)
    for name in ("without the plan", "with the plan") if memory.planned else ("without a plan",):
        table.add_column(name, justify="right", no_wrap=True)
    most = tuple(_most_texts(memory.step))
    if any(most):
        table.add_column("most at any time", justify="right", no_wrap=True, style="dim")
    for use, text in zip(Use, most, strict=True):
        if use is Use.LIBRARIES and not memory.step.most_for(use):  # on a CPU
            continue
        sizes = (format_bytes(step.peak.bytes_for(use)) for step in _columns(memory))
        table.add_row(use.value, *sizes, text)
    table.add_section()
    table.add_row("peak", *_peak_texts(memory), style="bold")
    if memory.device_memory_bytes is not None:
        table.add_row(f"of {format_bytes(memory.device_memory_bytes)}", *_fit_texts(memory))
    return table


def memory_facts(memory: Memory) -> Table:
    """Return where the peak stands, what goes to the host, and what the numbers rest on."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for what, text in _facts(memory):
        table.add_row(what, text)
    return table


def memory_values(memory: Memory) -> dict[str, Any]:
    """Return the prediction as one JSON-ready dict. The keys are a contract: add, never rename."""
    step, peak = memory.step, memory.step.peak
    return {
        "parameter_bytes": step.most_for(Use.PARAMETERS),
        "gradient_bytes": step.most_for(Use.GRADIENTS),
        "optimizer_bytes": step.most_for(Use.OPTIMIZER),
        "baseline_peak_bytes": memory.baseline.peak.total_bytes,
        "planned_peak_low_bytes": memory.planned_low_bytes,
        "planned_peak_high_bytes": memory.planned_high_bytes,
        "peak_at": _place_values(peak),
        "host_pinned_bytes": memory.host_pinned_bytes,
        "fits": memory.fits,
        "optimizer": memory.optimizer,
        "grad_in_backward": memory.grad_in_backward,
        "accumulate_gradients": memory.accumulate_gradients,
        "baseline_peak_at": _place_values(memory.baseline.peak),
        "activation_bytes": peak.bytes_for(Use.ACTIVATIONS),
        "workspace_bytes": peak.bytes_for(Use.WORKSPACE),
        "library_bytes": peak.bytes_for(Use.LIBRARIES),
        "copied_out_bytes": memory.copied_out_bytes,
        "copied_in_bytes": memory.copied_in_bytes,
        "copy_out_us": round(memory.copy_out_us, 1),
        "copy_in_us": round(memory.copy_in_us, 1),
        "forward_us": round(step.us_of(Phase.FORWARD), 1),
        "backward_us": round(step.us_of(Phase.BACKWARD), 1),
        "device": {"name": memory.device.name, "is_measured": memory.device.is_measured},
        "device_memory_bytes": memory.device_memory_bytes,
        "short_bytes": {
            "baseline": memory.short_bytes(memory.baseline.peak.total_bytes),
            "planned": memory.short_bytes(memory.planned_high_bytes),
        },
        "notes": list(memory.notes),
    }


def peak_text(memory: Memory) -> str:
    """Return the peak with the plan, an interval where copies are on their way: ``72.06 .. 72.50 GiB``."""
    low, high = format_bytes(memory.planned_low_bytes), format_bytes(memory.planned_high_bytes)
    if low == high:
        return high
    (number, unit), high_unit = low.split(), high.split()[1]
    return f"{number if unit == high_unit else low} .. {high}"


def ms_text(microseconds: float) -> str:
    """Return a time in ms, with a place after the point where it is short."""
    milliseconds = microseconds / 1000
    return f"{milliseconds:,.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"


def _columns(memory: Memory) -> tuple[StepMemory, ...]:
    return (memory.baseline, memory.step) if memory.planned else (memory.baseline,)


def _most_texts(step: StepMemory) -> Iterator[str]:
    """Yield for each use the most there is for it at any time; empty where the peak has as much."""
    for use in Use:
        most, at_peak = format_bytes(step.most_for(use)), format_bytes(step.peak.bytes_for(use))
        yield most if most != at_peak else ""


def _peak_texts(memory: Memory) -> Iterator[str]:
    yield format_bytes(memory.baseline.peak.total_bytes)
    if memory.planned:
        yield peak_text(memory)


def _fit_texts(memory: Memory) -> Iterator[Text]:
    yield _fit_text(memory, memory.baseline.peak.total_bytes)
    if not memory.planned:
        return
    if memory.short_bytes(memory.planned_high_bytes) and not memory.short_bytes(memory.planned_low_bytes):
        short = memory.short_bytes(memory.planned_high_bytes) or 0
        yield Text(f"short by up to {format_bytes(short)}", style="bold yellow")
    else:
        yield _fit_text(memory, memory.planned_high_bytes)


def _fit_text(memory: Memory, peak_bytes: int) -> Text:
    spare = (memory.device_memory_bytes or 0) - peak_bytes
    if spare < 0:
        return Text(f"short by {format_bytes(-spare)}", style="bold red")
    return Text(f"fits, {format_bytes(spare)} to spare", style="bold green")


def _facts(memory: Memory) -> Iterator[tuple[str, RenderableType]]:
    """Yield (what, text) of what is not in the table."""
    without, step = place_text(memory.baseline.peak), memory.step
    place = place_text(step.peak)
    if memory.planned and place != without:
        yield "peak without the plan", f"in {without}"
        yield "peak with the plan", f"in {place}"
    else:
        yield "the peak stands", f"in {place}"
    if memory.copied_out_bytes:
        yield "pinned host memory", format_bytes(memory.host_pinned_bytes)
        yield "copies out", _beside(memory.copied_out_bytes, memory.copy_out_us, step, Phase.FORWARD)
        yield "copies in", _beside(memory.copied_in_bytes, memory.copy_in_us, step, Phase.BACKWARD)
    gradients = ", gradients dropped in backward" * memory.grad_in_backward
    gradients += ", gradients of earlier batches there from the start" * memory.accumulate_gradients
    yield "optimizer", f"{memory.optimizer}{gradients}"
    source = MEASURED if memory.device.is_measured else FROM_DATA_SHEETS
    yield "device", f"{memory.device.name}; how fast it computes and copies is {source}"


def _beside(num_bytes: int, copy_us: float, step: StepMemory, phase: Phase) -> str:
    """Return a copy and the computation that hides it, e.g. ``3.4 GiB, 163 ms beside 111 ms of forward or more``."""
    beside = f"{ms_text(step.us_of(phase))} of {phase.value} or more"
    return f"{format_bytes(num_bytes)}, {ms_text(copy_us)} beside {beside}"


def _place_values(moment: Moment) -> dict[str, str]:
    return {"phase": moment.phase.value, "module": moment.module, "op": moment.op}
