"""The head of the report: which model, on what input, and what the plan comes to in one sentence."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memopt.ir import ModelFacts, Plan, PlanAccount, TraceInput, saved_bytes
from memopt.report.offload import offload_subject, why_nothing
from memopt.report.recompute import repeated_text
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
    saved = saved_bytes(plan.graph.saved).activation_bytes
    activations = format_bytes(saved)
    if not plan.decisions:
        return Text(f"Nothing is changed: {activations} of activations stay on the device for backward.", style="bold")
    recomputes = any(target.recompute for target in totals.targets) or bool(totals.offload and totals.offload.recipes)
    if totals.offload and not totals.swap_bytes and not recomputes:
        return Text(f"Nothing is offloaded: {why_nothing(totals.offload)}.", style="bold yellow")
    if not totals.swap_bytes and not recomputes:
        why = "all that passes the policy is margin" if totals.covered_bytes else "no saved tensor passes the policy"
        return Text(f"Nothing is swapped: {why}.", style="bold yellow")
    if recomputes and totals.net_freed_bytes <= 0:
        return Text(f"{_subject(totals)}s nothing: what it must hold for the replay is as large.", style="bold yellow")
    ending = f", and runs {repeated_text(totals)} twice." if recomputes and totals.repeated_flops else "."
    return Text.assemble(
        (f"{_subject(totals)}s ", "bold"),
        (f"{format_bytes(totals.net_freed_bytes)} ({totals.net_freed_bytes / saved:.0%})", "bold green"),
        (f" of the {activations} of activations that wait for backward{ending}", "bold"),
    )


def _subject(totals: PlanAccount) -> str:
    """Return what frees memory, with the verb but for its ending."""
    if totals.offload:
        return f"{offload_subject(totals)} free"
    policies = {target.recompute.policy for target in totals.targets if target.recompute}
    if not policies:
        return "Attention swap free"
    name = f"{policies.pop()} checkpointing".capitalize() if len(policies) == 1 else "Checkpointing"
    return f"{name} with swap free" if totals.swap_bytes else f"{name} free"


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
