"""Put a plan into effect on a live model, all of it or none."""

from dataclasses import dataclass

from torch import nn

from memopt.errors import PlanMismatchError, RewriteError
from memopt.ir import Plan
from memopt.runtime.contract import check_rewritable, preserved
from memopt.runtime.counters import Stats, summed
from memopt.runtime.engine import engine_of
from memopt.runtime.module_state import state_of
from memopt.runtime.region import Region, previous_of, region_of, set_previous
from memopt.runtime.rewrite import is_rewritten, restore_module, rewrite_module


@dataclass(frozen=True)
class Rewriting:
    """A plan in effect on a model."""

    model: nn.Module
    plan: Plan

    def stats(self) -> Stats:
        """Return what was registered and copied so far, over all rewritten modules of the model."""
        return summed(state_of(module).counters for module in self.model.modules() if is_rewritten(module))

    def undo(self) -> None:
        """Give every rewritten module its own class back."""
        undo(self.model)


def apply_plan(model: nn.Module, plan: Plan) -> Rewriting:
    """Rewrite the modules that a plan decides on.

    The same plan again changes nothing. Raises PlanMismatchError for a plan of another model, RewriteError for a
    model that was rewritten otherwise, IncompatibleError and GraphCompileError for what excludes a rewriting; the
    model is then as it was.
    """
    regions = _regions(model, plan)
    chain = [model.get_submodule(fqn) for fqn in plan.prefetch_chain]
    previous: dict[nn.Module, nn.Module | None] = dict(zip(chain, (None, *chain), strict=False))
    if present := {m: region for m in model.modules() if (region := region_of(m))}:
        if present != regions or any(previous_of(m) is not previous.get(m) for m in regions):
            raise RewriteError(
                f"{type(model).__name__} is rewritten by another plan already; call memopt.undo(model) before this one"
            )
        return Rewriting(model, plan)
    check_rewritable(model)
    try:
        with preserved(model):
            for module, region in regions.items():
                rewrite_module(module, region)
                set_previous(module, previous.get(module))
    except BaseException:
        undo(model)
        raise
    return Rewriting(model, plan)


def undo(model: nn.Module) -> None:
    """Take every rewriting out of a model, or out of a copy of one; what was saved before still comes back right."""
    for module in model.modules():
        if is_rewritten(module):
            restore_module(module)


def finish_copies(model: nn.Module) -> None:
    """Wait until every copy out of the model's devices has ended and its host memory is where it belongs."""
    for device in {p.device for p in model.parameters()}:
        engine_of(device).finish()


def _regions(model: nn.Module, plan: Plan) -> dict[nn.Module, Region]:
    """Return the modules that a plan means, each with its region; raises PlanMismatchError."""
    regions = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for key, decision in plan.decisions.items():
        expected = plan.graph.by_fqn[key.fqn].class_name
        module = modules.get(key.fqn)
        found = "nothing" if module is None else type(module).__name__
        if module is None or expected not in {cls.__name__ for cls in type(module).__mro__}:  # FSDP2 puts one on top
            raise PlanMismatchError(
                f"the plan was made for another model ({plan.graph.model.name}): at {key.fqn!r} it expects "
                f"{expected}, {type(model).__name__} has {found}; make a plan for this model"
            )
        regions[module] = Region(key.fqn, decision.action, decision.policy)
    return regions
