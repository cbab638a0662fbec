"""The head of the report: which model, on what input, and what the plan comes to in one sentence."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memopt.ir import ModelFacts, Plan, PlanAccount, TraceInput, saved_bytes
from memopt.units import format_bytes


def headline(plan: Plan, totals: PlanAccount) -> RenderableType:
    """Return the verdict and the facts that it rests on."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    facts.add_row("model", model_text(plan.graph.model))
    facts.add_row("input", input_text(plan.graph.input))
    return Group(verdict(plan, totals), "", facts)


def verdict(plan: Plan, totals: PlanAccount) -> Text:
    """Return what the plan does for the memory, in one sentence."""
    activations = format_bytes(saved_bytes(plan.graph.saved).activation_bytes)
    if not plan.decisions:
        return Text(f"Nothing is swapped: {activations} of activations stay on the device for backward.", style="bold")
    if not totals.swap_bytes:
        why = "all that passes the policy is margin" if totals.covered_bytes else "no saved tensor passes the policy"
        return Text(f"Nothing is swapped: {why}.", style="bold yellow")
    share = totals.freed_bytes / saved_bytes(plan.graph.saved).activation_bytes
    return Text.assemble(
        ("Attention swap frees ", "bold"),
        (f"{format_bytes(totals.freed_bytes)} ({share:.0%})", "bold green"),
        (f" of the {activations} of activations that wait for backward.", "bold"),
    )


def model_text(model: ModelFacts) -> str:
    """Return which model, and how large."""
    weights = format_bytes(model.parameter_bytes)
    return f"{model.name} ({model.class_name}), {count_text(model.num_parameters)} parameters, {weights} of weights"


def input_text(given: TraceInput) -> str:
    """Return what the model was traced with."""
    autocast = "no autocast" if given.autocast == "none" else f"autocast {given.autocast}"
    size = f"{given.batch_size} x {given.seq_length} tokens"
    return f"{size}, {given.dtype}, {autocast}, {given.attn_implementation} attention, for {given.target_device}"


def count_text(count: int) -> str:
    """Return a number of things as people say it: ``30.5 billion``."""
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count:,}"
