"""What a reader must know besides the numbers."""

from memopt.ir import OFFLOAD, Action, Plan, account
from memopt.report.offload import offloads_nothing

ACCEPTED_CLASS = "Qwen3MoeForCausalLM"


def notes_of(plan: Plan) -> tuple[str, ...]:
    """Return the notes of the trace and of the passes, and those that the decisions call for."""
    class_name = plan.graph.model.class_name
    notes = (*plan.graph.notes, *plan.notes)
    recomputes = any(d.action is Action.RECOMPUTE for d in plan.decisions.values())
    if plan.offload and recomputes and (why := offloads_nothing(account(plan))):  # else the headline says it
        notes = (*notes, why)
    swaps = any(d.action is not Action.RECOMPUTE and d.policy != OFFLOAD for d in plan.decisions.values())
    if not swaps or class_name == ACCEPTED_CLASS:
        return notes
    unaccepted = (
        f"{class_name} is not an accepted model: attention swap is promised for {ACCEPTED_CLASS} alone. "
        "It follows the same rules here; prove it on your training with memopt-apply before you rely on it."
    )
    return (*notes, unaccepted)
