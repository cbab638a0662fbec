"""Which decisions a plan may hold together, and which regions a decision may name."""

from collections.abc import Iterator
from itertools import permutations

from memopt.errors import IllegalValueError, InvalidPlanError
from memopt.ir.graph import ModuleGraph
from memopt.ir.offload import Offload
from memopt.ir.offload_request import check_count, check_fraction, check_inflight, check_margin
from memopt.ir.plan import OFFLOAD, RECIPE, Action, Decision, Plan, RegionKey, enclosing
from memopt.ir.region_search import region_layers
from memopt.ir.regions import ALL_REGIONS, FUSED_GROUP_MLP, FUSED_PARTS, MODULE

MOE_ACT = "moe_act"
"""The one region that can be recomputed: other parts are modules."""


def verify_regions(plan: Plan) -> None:
    """Raise an InvalidPlanError for a region that is none, or for decisions that exclude each other."""
    _verify_settings(plan.offload)
    layers: tuple[str, ...] | None = None
    for key, decision in plan.decisions.items():
        if wrong := _wrong_region(plan.graph, key, decision):
            raise InvalidPlanError(f"decision on {str(key)!r}: {wrong}")
        if key.region in ALL_REGIONS and decision.action is not Action.RECOMPUTE:
            layers = region_layers(plan.graph) if layers is None else layers
            if plan.graph.by_fqn[key.fqn].fqn not in layers:
                raise InvalidPlanError(
                    f"decision on {str(key)!r}: only a layer has such regions, and {key.fqn!r} is none"
                )
    modules = _by_module(plan)
    for keys in modules.values():
        _verify_one_module(keys)
    for node in modules:
        _verify_around(plan, modules, node)


def _verify_settings(settings: Offload | None) -> None:
    if settings is None:
        return
    try:
        for key in ("min_tensor_elements", "pp_rank", "pp_rank_delta_bytes"):
            check_count(key, getattr(settings, key))
        check_fraction("fraction", settings.fraction)
        check_inflight("max_inflight", settings.max_inflight)
        check_margin("margin", settings.margin)
    except IllegalValueError as error:
        raise InvalidPlanError(f"settings of offload: {error}") from None


def _wrong_region(graph: ModuleGraph, key: RegionKey, decision: Decision) -> str:
    """Return what is wrong with the region that a decision names, empty where nothing is."""
    if key.region and (first := graph.by_fqn[key.fqn].fqn) != key.fqn:
        return f"a region is named by the module's first name, {first!r}"
    if decision.action is Action.RECOMPUTE:
        return _wrong_recomputed(graph, key, decision)
    if not key.region:
        return f"policy {OFFLOAD!r} is for regions" if decision.policy == OFFLOAD else ""
    if key.region.startswith(MODULE):
        path = key.region.removeprefix(MODULE)
        fqn = f"{key.fqn}.{path}" if key.fqn and path else key.fqn or path
        if fqn not in graph.by_fqn:
            return f"the model has no module {fqn!r}"
    elif key.region not in ALL_REGIONS:
        return f"no region is called {key.region!r}; legal: '', {', '.join(ALL_REGIONS)}, {MODULE}PATH"
    return "" if decision.policy == OFFLOAD else f"a region has the policy {OFFLOAD!r}, not {decision.policy!r}"


def _wrong_recomputed(graph: ModuleGraph, key: RegionKey, decision: Decision) -> str:
    if decision.policy == OFFLOAD:
        return f"what is recomputed has no policy {OFFLOAD!r}"
    if key.region and key.region != MOE_ACT:
        return f"no region is called {key.region!r}; legal: '' and {MOE_ACT} for what is recomputed"
    if key.region and decision.route not in ("", RECIPE):
        return f"a region is recomputed by the route {RECIPE!r}, not {decision.route!r}"
    if (key.region or decision.route == RECIPE) and decision.policy != "full":
        return f"what is recomputed by the route {RECIPE!r} has the policy 'full', not {decision.policy!r}"
    if key.region and not any(
        part.region == key.region and graph.calls[part.call].fqn == graph.by_fqn[key.fqn].fqn for part in graph.parts
    ):
        return f"{key.fqn!r} has no such part in the trace"
    return ""


def _by_module(plan: Plan) -> dict[str, list[RegionKey]]:
    modules: dict[str, list[RegionKey]] = {}
    for key in plan.decisions:
        modules.setdefault(plan.graph.by_fqn[key.fqn].fqn, []).append(key)
    return modules


def _verify_one_module(keys: list[RegionKey]) -> None:
    regions = [key.region for key in keys]
    if len(set(regions)) < len(regions) or ("" in regions and len(regions) > 1):
        raise InvalidPlanError("two decisions on one module")
    if FUSED_GROUP_MLP in regions and (parts := [region for region in regions if region in FUSED_PARTS]):
        raise InvalidPlanError(f"decision on {keys[0].fqn!r}: {FUSED_GROUP_MLP} holds {parts[0]}, which has one too")
    for inner, outer in permutations([r.removeprefix(MODULE) for r in regions if r.startswith(MODULE)], 2):
        if not outer or outer in enclosing(inner):
            raise InvalidPlanError(f"decision on {f'{MODULE}{inner}'!r}: it lies inside {f'{MODULE}{outer}'!r}")


def _verify_around(plan: Plan, modules: dict[str, list[RegionKey]], node: str) -> None:
    """Refuse a decision inside of a module that has one, but for recomputing inside of what is offloaded by regions."""
    recomputed = all(plan.decisions[key].action is Action.RECOMPUTE for key in modules[node])
    for around in _around(plan.graph, modules, node):
        if not (recomputed and all(plan.decisions[key].policy == OFFLOAD for key in modules[around])):
            key = str(modules[node][0])
            raise InvalidPlanError(f"decision on {key!r}: it lies inside {around!r}, which has one too")


def _around(graph: ModuleGraph, modules: dict[str, list[RegionKey]], node: str) -> Iterator[str]:
    for fqn in graph.by_fqn[node].fqns:
        around = enclosing(fqn) | ({""} if fqn else set())
        yield from sorted(around & modules.keys(), reverse=True)
