"""What a plan's decisions mean for each module: one region a module, whatever parts of it they name."""

from collections.abc import Iterator

from memopt.ir import OFFLOAD, Action, Plan
from memopt.ir.plan import RECIPE, Decision
from memopt.ir.region_search import region_layers
from memopt.runtime.region import Region


def planned_regions(plan: Plan) -> Iterator[Region]:
    """Yield the region of every module that is to be rewritten."""
    modules: dict[str, dict[str, Decision]] = {}
    for key, decision in plan.decisions.items():
        modules.setdefault(key.fqn, {})[key.region] = decision
    last = plan.prefetch_chain[-1] if plan.prefetch_chain else None
    for fqn, decisions in modules.items():
        yield _region(plan, fqn, decisions, is_last=fqn == last)
    for fqn in _collectors(plan):
        if fqn not in modules:
            yield Region(fqn, Action.KEEP, OFFLOAD)


def _region(plan: Plan, fqn: str, decisions: dict[str, Decision], *, is_last: bool) -> Region:
    if whole := decisions.get(""):
        recipes = whole.route == RECIPE
        return Region(fqn, whole.action, whole.policy, compiles=whole.compiles, gives_recipes=recipes)
    parts = tuple((name, decision.action) for name, decision in decisions.items())
    actions = {action for _, action in parts}
    if actions == {Action.RECOMPUTE}:
        return Region(fqn, Action.RECOMPUTE, "full", parts=parts)
    action = Action.SWAP if Action.SWAP in actions else Action.KEEP
    return Region(fqn, action, OFFLOAD, parts=parts, offload=plan.offload, is_last=is_last)


def _collectors(plan: Plan) -> Iterator[str]:
    """Yield the layers around parts whose outputs are not kept: who saves one there is to save a recipe."""
    recipes = [key.fqn for key, decision in plan.decisions.items() if decision.route == RECIPE]
    for layer in region_layers(plan.graph) if recipes else ():
        if any(fqn.startswith(f"{layer}.") for fqn in recipes):
            yield layer
