"""Plans to and from JSON; pydantic validates what comes in, so that a bad file is named, not guessed at."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from memopt.errors import InvalidPlanError, UnreadableFileError
from memopt.ir.consistency import first_fault
from memopt.ir.graph import ModuleGraph
from memopt.ir.offload import Offload
from memopt.ir.plan import Decision, Plan, RegionKey

PLAN_SCHEMA_VERSION = 5


def plan_to_json(plan: Plan) -> str:
    """Return a plan, its graph included, as JSON text."""
    decisions = [(key.fqn, key.region, decision) for key, decision in plan.decisions.items()]
    document = _document()(
        schema_version=PLAN_SCHEMA_VERSION,
        graph=plan.graph,
        decisions=decisions,
        prefetch_chain=plan.prefetch_chain,
        offload=plan.offload,
        notes=plan.notes,
    )
    return document.model_dump_json()


def plan_from_json(text: str | bytes, *, path: object = "text") -> Plan:
    """Read a plan; raises UnreadableFileError, naming the key, for what is no plan or one that contradicts itself."""
    from pydantic import ValidationError

    try:
        document = _document().model_validate_json(text)
    except ValidationError as error:
        if _is_report(text):
            why = "it is a report; memopt-analyze --save-plan PLAN.json writes a plan"
            raise UnreadableFileError("plan", path, why) from None
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "document"
        raise UnreadableFileError("plan", path, f"{where}: {first['msg']}") from None
    if fault := first_fault(document.graph):
        raise UnreadableFileError("plan", path, f"graph.{fault[0]}: {fault[1]}")
    plan = Plan(
        graph=document.graph,
        decisions=_decisions(document, path),
        prefetch_chain=document.prefetch_chain,
        offload=document.offload,
        notes=document.notes,
    )
    _verify(plan, path)
    return plan


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan to a file."""
    Path(path).write_text(plan_to_json(plan))


def load_plan(path: str | Path) -> Plan:
    """Read a plan from a file; raises as `plan_from_json`, and UnreadableFileError for a file that is not there."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise UnreadableFileError("plan", path, error.strerror or str(error)) from None
    return plan_from_json(text, path=path)


def _is_report(text: str | bytes) -> bool:
    """Tell whether a JSON text that is no plan is what memopt-analyze or memopt-apply --format json prints."""
    try:
        keys = set(json.loads(text))
    except (ValueError, TypeError):
        return False
    return keys >= {"targets", "swap", "saved"} or keys >= {"verified", "predicted_swap_bytes"}


def _decisions(document: Any, path: object) -> dict[RegionKey, Decision]:
    """Return the decisions by region; a second one on a region is refused, for the mapping would hide it."""
    decisions: dict[RegionKey, Decision] = {}
    for number, (fqn, region, decision) in enumerate(document.decisions):
        key = RegionKey(fqn, region)
        if key in decisions:
            raise UnreadableFileError("plan", path, f"decisions.{number}: {str(key)!r} has a decision already")
        decisions[key] = decision
    return decisions


def _verify(plan: Plan, path: object) -> None:
    """Verify the decisions, then the chain, so that the error can name the key that is wrong."""
    for key, part in (("decisions", replace(plan, prefetch_chain=())), ("prefetch_chain", plan)):
        try:
            part.verify()
        except InvalidPlanError as error:
            raise UnreadableFileError("plan", path, f"{key}: {error}") from None


def _document() -> Any:
    """Return the model of a plan file, made when first needed: pydantic is no dependency of the library itself."""
    from typing import Literal

    from pydantic import create_model

    return create_model(
        "PlanFile",
        __config__={"extra": "forbid"},
        schema_version=(Literal[5], ...),
        graph=(ModuleGraph, ...),
        decisions=(list[tuple[str, str, Decision]], ...),
        prefetch_chain=(tuple[str, ...], ...),
        offload=(Offload | None, ...),
        notes=(tuple[str, ...], ...),
    )
