"""The memory of a step over its operators, as a picture to look around in."""

from bisect import bisect_right
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

from memopt.errors import MissingPackageError
from memopt.ir import Memory, Moment, Phase, StepMemory, Use
from memopt.report.memory import peak_text
from memopt.report.places import place_text
from memopt.units import GIB, MIB, format_bytes

PLOTLY = "plotly>=6"
HEIGHT = 620
COLOURS = {
    Use.PARAMETERS: "#4c5f7a",
    Use.OPTIMIZER: "#7f93b2",
    Use.LIBRARIES: "#b9c4d4",
    Use.GRADIENTS: "#5aa17f",
    Use.ACTIVATIONS: "#e9a13b",
    Use.WORKSPACE: "#d9705a",
}
"""From the bottom of the stack to its top: what is always there lies below what comes and goes."""
WITHOUT_PLAN, LIMIT = "#22272e", "#b3261e"
_GRID = "#e3e6ea"


def check_picture() -> None:
    """Raise a MissingPackageError unless a picture can be made."""
    if find_spec("plotly") is None:
        raise MissingPackageError("the picture of an HTML report", PLOTLY, "give --no-predict or another --format")


def timeline_html(memory: Memory, *, title: str) -> str:
    """Return the picture as a part of a page, with the script that it needs."""
    figure = timeline_figure(memory, title=title)
    return figure.to_html(full_html=False, include_plotlyjs=True, config={"displaylogo": False, "responsive": True})


def timeline_figure(memory: Memory, *, title: str) -> Any:
    """Return the step that decides as a stack of its uses, and the total without the plan as a line."""
    check_picture()
    from plotly import graph_objects

    step, (unit, unit_name) = memory.step, _unit(memory)
    figure = graph_objects.Figure()
    for use in filter(step.most_for, COLOURS):
        line = {"width": 0, "color": COLOURS[use]}
        figure.add_scatter(**_area(step, use, unit), line=line, fillcolor=COLOURS[use], stackgroup="uses")
    total = _total(step, unit, name="with the plan" if memory.planned else "in all")
    figure.add_scatter(**total, line={"color": WITHOUT_PLAN}, opacity=0, showlegend=False)
    if memory.planned:
        baseline = _total(memory.baseline, unit, name="without the plan") | _beside(memory)
        figure.add_scatter(**baseline, line={"width": 1.5, "color": WITHOUT_PLAN, "dash": "dot"})
    if memory.device_memory_bytes is not None:
        _draw_limit(figure, memory.device_memory_bytes, unit, is_above=memory.device_memory_bytes > _top(memory))
    _mark_phases(figure, step)
    _mark_peak(figure, memory, unit)
    _lay_out(figure, title=title, unit_name=unit_name, size=(step.num_operators, 1.18 * _top(memory) / unit))
    return figure


def _unit(memory: Memory) -> tuple[int, str]:
    return (GIB, "GiB") if memory.baseline.peak.total_bytes >= GIB // 2 else (MIB, "MiB")


def _area(step: StepMemory, use: Use, unit: int) -> dict[str, Any]:
    sizes = [moment.bytes_for(use) / unit for moment in step.moments]
    return {"x": [moment.at for moment in step.moments], "y": sizes, "name": use.value, "hoverinfo": "skip"}


def _total(step: StepMemory, unit: int, *, name: str) -> dict[str, Any]:
    """Return the line of all that is there, which says of each point what runs and what the memory is for."""
    return {
        "x": [moment.at for moment in step.moments],
        "y": [moment.total_bytes / unit for moment in step.moments],
        "name": name,
        "customdata": [[format_bytes(moment.total_bytes), _told(moment)] for moment in step.moments],
        "hovertemplate": f"<b>%{{customdata[0]}} {name}</b><br>%{{customdata[1]}}<extra></extra>",
    }


def _told(moment: Moment) -> str:
    uses = [f"{use.value} {format_bytes(size)}" for use in reversed(COLOURS) if (size := moment.bytes_for(use))]
    return "<br>".join((place_text(moment), *uses))


def _beside(memory: Memory) -> dict[str, Any]:
    """Return how the line of the step without the plan goes and is called beside the stack of the one with it."""
    peak = format_bytes(memory.baseline.peak.total_bytes)
    return {"x": list(_stretched(memory.baseline, memory.step)), "name": f"without the plan<br>(peak {peak})"}


def _stretched(step: StepMemory, like: StepMemory) -> Iterator[float]:
    """Yield a place for each moment, phases beginning and ending where those of another step do."""
    ends, others = _borders(step), _borders(like)
    for moment in step.moments:
        at = min(bisect_right(ends, moment.at), len(ends) - 1)
        share = (moment.at - ends[at - 1]) / max(1, ends[at] - ends[at - 1])
        yield others[at - 1] + share * (others[at] - others[at - 1])


def _borders(step: StepMemory) -> list[int]:
    """Return where each phase begins, and where the last one ends."""
    first = {
        phase: min((m.at for m in step.moments if m.phase is phase), default=step.num_operators) for phase in Phase
    }
    return [0, first[Phase.BACKWARD], first[Phase.OPTIMIZER], step.num_operators]


def _mark_phases(figure: Any, step: StepMemory) -> None:
    for phase, (first, end) in zip(Phase, pairwise(_borders(step)), strict=True):
        if end - first < step.num_operators / 50:  # no room for its name
            continue
        figure.add_annotation(
            x=(first + end) / 2, y=1, yref="paper", yshift=14, text=f"<b>{phase.value}</b>", showarrow=False
        )
        if end < step.num_operators:
            figure.add_vline(x=end, line={"width": 1, "color": "#8b949e", "dash": "dash"})


def _mark_peak(figure: Any, memory: Memory, unit: int) -> None:
    peak, half = memory.step.peak, memory.step.num_operators / 2
    figure.add_annotation(
        x=peak.at,
        y=peak.total_bytes / unit,
        text=f"peak{' with the plan' * bool(memory.planned)} {peak_text(memory)}<br>in {place_text(peak)}",
        ax=-70 if peak.at > half else 70,
        ay=1.1 * _top(memory) / unit,
        ayref="y",
        xanchor="right" if peak.at > half else "left",
        align="left",
        arrowhead=2,
        arrowcolor=WITHOUT_PLAN,
        bgcolor="rgba(255,255,255,0.9)",
        bordercolor="#8b949e",
        borderpad=4,
    )


def _draw_limit(figure: Any, limit: int, unit: int, *, is_above: bool) -> None:
    """Draw how much memory there is; a limit far above all lines would press them flat, and is told in words."""
    text, font = f"device memory, {format_bytes(limit)}", {"color": LIMIT}
    if is_above:
        figure.add_annotation(
            x=0.005,
            y=1,
            xref="paper",
            yref="paper",
            text=f"{text}, lies far above",
            font=font,
            showarrow=False,
            yshift=-6,
        )
        return
    figure.add_hline(
        y=limit / unit,
        line={"width": 2, "color": LIMIT},
        annotation={"text": text, "font": font},
        annotation_position="top left",
    )


def _top(memory: Memory) -> float:
    """Return what all lines of the picture lie below; a limit that is far above them is left out."""
    highest = max(step.peak.total_bytes for step in (memory.baseline, memory.step))
    limit = memory.device_memory_bytes or 0
    return limit if highest < limit < 2.5 * highest else highest


def _lay_out(figure: Any, *, title: str, unit_name: str, size: tuple[float, float]) -> None:
    width, top = size
    figure.update_layout(
        template="plotly_white",
        title={"text": title, "x": 0.01, "xanchor": "left"},
        font={"family": "Helvetica, Arial, sans-serif", "size": 13},
        height=HEIGHT,
        margin={"l": 70, "r": 30, "t": 90, "b": 60},
        hovermode="x",
        hoverlabel={"bgcolor": "white", "font": {"color": WITHOUT_PLAN}, "align": "left"},
        legend={"traceorder": "reversed"},
        xaxis={"title": "operator of the step", "range": [0, 1.01 * width], "gridcolor": _GRID, "tickformat": ",d"},
        yaxis={"title": unit_name, "range": [0, top], "gridcolor": _GRID, "rangemode": "tozero"},
    )
