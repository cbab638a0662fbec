"""Put a plan into effect on a live model, all of it or none."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from memopt.errors import PlanMismatchError, RewriteError
from memopt.ir import RECIPE, Action, Plan
from memopt.runtime.contract import check_rewritable, preserved
from memopt.runtime.counters import Counters, Stats, summed
from memopt.runtime.engine import engine_of, engines_in_use
from memopt.runtime.module_state import state_of
from memopt.runtime.planned import planned_regions
from memopt.runtime.pool import PoolStats
from memopt.runtime.region import Region, previous_of, region_of, set_previous
from memopt.runtime.rewrite import is_rewritten, restore_module, rewrite_module
from memopt.runtime.settling import settle_after_forward, take_off_settling


@dataclass(frozen=True, repr=False)
class Rewriting:
    """A plan in effect on a model."""

    model: nn.Module
    plan: Plan
    counters: tuple[Counters, ...] = ()
    """Of the modules that it rewrote; they can still be read when it is undone."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.counters)} modules of {type(self.model).__name__}>"

    def stats(self) -> Stats:
        """Return what was registered, copied and replayed since the plan came into effect.

        What torch.compile runs is not counted: in its graph nothing of memopt is left. All zero says no more than that.
        """
        return summed(self.counters)

    def pool_stats(self) -> dict[torch.device, PoolStats]:
        """Return, for each device of the model, what was asked of its host memory since `reset_pool_stats`."""
        finish_copies(self.model)
        return {device: engine_of(device).pool.stats() for device in _devices(self.model)}

    def reset_pool_stats(self) -> None:
        """Count hits, misses and the peak from now on, say at the beginning of a step."""
        for device in _devices(self.model):
            engine_of(device).pool.reset_stats()

    def undo(self) -> None:
        """Give every rewritten module its own class back."""
        undo(self.model)


def apply_plan(model: nn.Module, plan: Plan) -> Rewriting:
    """Rewrite the modules that a plan decides on.

    The same plan again changes nothing. Raises PlanMismatchError for a plan of another model, RewriteError for a
    model that was rewritten otherwise, IncompatibleError and GraphCompileError for what excludes a rewriting; the
    model is then as it was.
    """
    decisions = plan.decisions.values()
    if not any(map(region_of, model.modules())):  # before the names are compared: a compiled model has others
        swaps = any(decision.action is not Action.RECOMPUTE for decision in decisions)
        parts = plan.offload is not None or any(decision.route == RECIPE for decision in decisions)
        check_rewritable(model, swaps=swaps, compiles=any(d.compiles for d in decisions), parts=parts)
    regions = _regions(model, plan)
    chain = [model.get_submodule(fqn) for fqn in plan.prefetch_chain]
    previous: dict[nn.Module, nn.Module | None] = dict(zip(chain, (None, *chain), strict=False))
    if present := {m: region for m in model.modules() if (region := region_of(m))}:
        if present != regions or any(previous_of(m) is not previous.get(m) for m in regions):
            raise RewriteError(
                f"{type(model).__name__} is rewritten by another plan already; call memopt.undo(model) before this one"
            )
        return _rewriting(model, plan, regions)
    try:
        with preserved(model):
            for module, region in regions.items():
                rewrite_module(module, region)
                set_previous(module, previous.get(module))
            if any(region.action is Action.SWAP for region in regions.values()):
                settle_after_forward(model)
    except BaseException:
        undo(model)
        raise
    return _rewriting(model, plan, regions)


def undo(model: nn.Module) -> None:
    """Take every rewriting out of a model, or out of a copy of one; what was saved before still comes back right."""
    rewritten = [module for module in model.modules() if is_rewritten(module) or region_of(module) is not None]
    take_off_settling(model)
    for module in rewritten:
        restore_module(module)
    if rewritten:  # no later forward will give back what the last copies hold
        for engine in engines_in_use(_devices(model)):
            engine.finish()


def finish_copies(model: nn.Module) -> None:
    """Wait until every copy out of the model's devices has ended and its host memory is where it belongs."""
    for device in _devices(model):
        engine_of(device).finish()


def _devices(model: nn.Module) -> set[torch.device]:
    return {p.device for p in model.parameters() if p.device.type != "meta"}


def _rewriting(model: nn.Module, plan: Plan, regions: Iterable[nn.Module]) -> Rewriting:
    return Rewriting(model, plan, tuple(state_of(module).counters for module in regions))


def _regions(model: nn.Module, plan: Plan) -> dict[nn.Module, Region]:
    """Return the modules that a plan means, each with its region; raises PlanMismatchError."""
    regions = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for region in planned_regions(plan):
        expected = plan.graph.by_fqn[region.fqn].class_name
        module = modules.get(region.fqn)
        found = "nothing" if module is None else type(module).__name__
        if module is None or not _is_one_of(module, {expected}):
            raise PlanMismatchError(
                f"the plan was made for another model ({plan.graph.model.name}): at {region.fqn!r} it expects "
                f"{expected}, {type(model).__name__} has {found}; make a plan for this model"
            )
        regions[module] = region
    kinds = {plan.graph.by_fqn[key.fqn].class_name for key in plan.decisions}
    for fqn, module in modules.items():
        if fqn not in plan.graph.by_fqn and _is_one_of(module, kinds):
            raise PlanMismatchError(
                f"the plan was made for another model ({plan.graph.model.name}): it knows nothing of {fqn!r}; "
                "make a plan for this model"
            )
    return regions


def _is_one_of(module: nn.Module, class_names: set[str]) -> bool:
    return any(cls.__name__ in class_names for cls in type(module).__mro__)  # FSDP2 puts a class of its own on top
