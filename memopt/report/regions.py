"""The regions of a model as a table and as plain values: what fine-grained offload can name, and what it would find."""

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memopt.ir import ModuleGraph, saved_bytes
from memopt.ir.region_search import RegionLine, RegionSummary, region_summary
from memopt.ir.regions import FUSED_GROUP_MLP, FUSED_PARTS, REGIONS
from memopt.report.headline import input_text, model_text
from memopt.units import count_noun, format_bytes, mib_text

SCHEMA_VERSION = 1
ABSENT = "the model has none"
UNNAMED = "in no region"
OUTSIDE = "outside of layers"
MEANINGS = {**REGIONS, FUSED_GROUP_MLP: ", ".join(FUSED_PARTS[:-1]) + f" and {FUSED_PARTS[-1]} as one"}


def regions_report(graph: ModuleGraph) -> RenderableType:
    """Return every region of a model with its groups, tensors and bytes as a page to read."""
    summary = region_summary(graph)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    facts.add_row("model", model_text(graph.model))
    facts.add_row("input", input_text(graph.input))
    return Group(verdict(graph, summary), "", facts, "", regions_table(summary))


def regions_values(graph: ModuleGraph) -> dict[str, Any]:
    """Return what the report says as one JSON-ready dict. The keys are a contract: add, never rename."""
    summary = region_summary(graph)
    return {
        "schema_version": SCHEMA_VERSION,
        "model": {"name": graph.model.name, "class": graph.model.class_name},
        "input": asdict(graph.input),
        "num_layers": summary.num_layers,
        "regions": [
            {"region": line.region, "present": line.num_tensors > 0, **_numbers(line)} for line in summary.regions
        ],
        "in_no_region": _numbers(summary.unnamed),
        "outside_of_layers": {"tensors": summary.outside.num_tensors, "bytes": summary.outside.num_bytes},
    }


def verdict(graph: ModuleGraph, summary: RegionSummary) -> Text:
    """Return how many regions there are, in one sentence."""
    if not summary.num_layers:
        return Text(
            "No layers were found, so that nothing has a region; module:PATTERN names any module.", style="bold"
        )
    present = sum(line.num_tensors > 0 and line.region != FUSED_GROUP_MLP for line in summary.regions)
    activations = f"{format_bytes(saved_bytes(graph.saved).activation_bytes)} of activations"
    layers = count_noun(summary.num_layers, "layer")
    return Text(f"{count_noun(present, 'region')} in {layers}; the whole model saves {activations}.", style="bold")


def regions_table(summary: RegionSummary) -> Table:
    """Return a row a region, then what lies in none; a storage counts in each region that saves it."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("region", no_wrap=True)
    for name in ("groups", "tensors", "MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what it is")
    for line in summary.regions:
        if line.num_tensors:
            table.add_row(line.region, *_cells(line), MEANINGS[line.region])
        else:
            table.add_row(line.region, "", "", "", ABSENT, style="dim")
    table.add_section()
    table.add_row(UNNAMED, *_cells(summary.unnamed), "what layers save besides, as rotary embeddings")
    table.add_row(OUTSIDE, "", *_cells(summary.outside)[1:], "embeddings, the last norm, the loss")
    return table


def _cells(line: RegionLine) -> tuple[str, str, str]:
    return f"{line.num_groups:,}", f"{line.num_tensors:,}", mib_text(line.num_bytes)


def _numbers(line: RegionLine) -> dict[str, int]:
    return {"groups": line.num_groups, "tensors": line.num_tensors, "bytes": line.num_bytes}
