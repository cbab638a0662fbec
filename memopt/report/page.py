"""The whole report, in the order in which it is read."""

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from memopt.ir import Memory, Plan, PlanAccount, account, saved_bytes
from memopt.report.advice import advice_of
from memopt.report.folding import fold_chain, fold_targets
from memopt.report.headline import headline
from memopt.report.memory import memory_facts, memory_table
from memopt.report.notes import notes_of
from memopt.report.offload import offload_tables
from memopt.report.saved import saved_table, weights_sentence
from memopt.report.table import target_tables
from memopt.report.totals import copy_sentence, totals_table


def plan_report(plan: Plan, memory: Memory | None = None) -> RenderableType:
    """Return a plan as a page to read, with the memory of a step if that was predicted."""
    totals = account(plan)
    return Group(headline(plan, totals), *_sections(plan, totals, memory))


def _sections(plan: Plan, totals: PlanAccount, memory: Memory | None) -> Iterator[RenderableType]:
    if plan.decisions:
        yield from _section("Totals", totals_table(totals, saved_bytes(plan.graph.saved).activation_bytes))
    if memory:
        yield from _section("Memory of a training step, predicted", *_memory(plan, memory))
    elif totals.swap_bytes:
        yield from _section("Copy time", Text(copy_sentence(totals)))
    if totals.offload:
        for title, table in offload_tables(totals.offload):
            yield from _section(title, table)
    if totals.targets:
        yield from _section("Targets", target_tables(fold_targets(totals.targets)))
    if plan.prefetch_chain:
        yield from _section("Prefetch chain", chain_text(plan))
    yield from _section("All activations saved for backward", saved_table(plan.graph), *_weights(plan))
    if notes := notes_of(plan):
        yield from _section("Notes", bullets(notes))


def _memory(plan: Plan, memory: Memory) -> Iterator[RenderableType]:
    yield from (memory_table(memory), "", memory_facts(memory))
    if advice := advice_of(plan, memory):
        yield from ("", bullets(advice))


def bullets(notes: Iterable[str]) -> RenderableType:
    """Return notes as a list whose lines hang."""
    table = Table.grid(padding=(0, 1, 0, 0))
    for note in notes:
        table.add_row("-", Text(note))
    return table


def _weights(plan: Plan) -> tuple[RenderableType, ...]:
    sentence = weights_sentence(plan.graph)
    return ("", Text(sentence, style="dim")) if sentence else ()


def chain_text(plan: Plan) -> Text:
    """Return the order in which the targets come back, equal layers folded."""
    chain = " -> ".join(fold_chain(plan.prefetch_chain))
    return Text.assemble(
        (chain, "bold"), "\nForward runs in this order; backward of each brings back the one before it."
    )


def _section(title: str, *body: RenderableType) -> Iterator[RenderableType]:
    yield ""
    yield Rule(Text(title, style="bold"), align="left", style="dim")
    yield from (Padding(part, (0, 0, 0, 2)) for part in body)
