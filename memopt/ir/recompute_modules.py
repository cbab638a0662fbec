"""The modules, and the parts of modules, that the names of `recompute` stand for."""

from collections.abc import Callable, Iterable, Iterator
from types import MappingProxyType

from memopt.ir.graph import ModuleGraph
from memopt.ir.layers import outermost_of, saves_activations
from memopt.ir.plan import RECIPE, RegionKey
from memopt.ir.region_groups import paths_in
from memopt.ir.region_names import ACTIVATIONS
from memopt.ir.region_search import region_layers
from memopt.ir.regions import Save, regions_in

SUBMODULE = "submodule"
MOE_ACT = "moe_act"
_EXPERTS = "experts"
_NORMS = frozenset({"attn_norm", "mlp_norm", "qk_norm"})


def recomputable(graph: ModuleGraph, name: str) -> dict[RegionKey, str]:
    """Return what one name of `recompute` stands for, each with its route: outermost modules that save something.

    A norm that is an Identity saves nothing and is left out, and so is what is frozen.
    """
    if name == MOE_ACT:
        return _moe_activations(graph)
    route, is_meant = _MODULES[name]
    found = [fqn for layer in region_layers(graph) for fqn in _matching(graph, layer, is_meant)]
    return {RegionKey(fqn): route for fqn in _saving(graph, found)}


def _moe_activations(graph: ModuleGraph) -> dict[RegionKey, str]:
    """Return the experts that have their activation as a method, and the activation modules of others."""
    parts = dict.fromkeys(graph.calls[part.call].fqn for part in graph.parts if part.region == MOE_ACT)
    modules = [
        fqn
        for layer in region_layers(graph)
        for fqn in _matching(graph, layer, lambda path, _: _is_activation(path) and _has_experts(path))
        if not any(f"{fqn}.".startswith(f"{part}.") for part in parts)
    ]
    keys = [*(RegionKey(part, MOE_ACT) for part in parts), *map(RegionKey, _saving(graph, modules))]
    return dict.fromkeys(keys, RECIPE)


def _matching(graph: ModuleGraph, layer: str, is_meant: Callable[[str, Iterable[str]], bool]) -> Iterator[str]:
    paths = paths_in(graph, layer)
    yield from (fqn for path, fqn in paths.items() if is_meant(path, paths))


def _saving(graph: ModuleGraph, fqns: Iterable[str]) -> tuple[str, ...]:
    return tuple(fqn for fqn in outermost_of(graph, fqns) if saves_activations(graph, fqn))


def _region(path: str) -> str:
    return regions_in([Save(path)])[0]


def _is_activation(path: str) -> bool:
    return path.rpartition(".")[2] in ACTIVATIONS


def _has_experts(path: str) -> bool:
    return _EXPERTS in path.split(".")


def _is_norm(path: str, _: Iterable[str]) -> bool:
    return _region(path) in _NORMS


def _is_dense_activation(path: str, paths: Iterable[str]) -> bool:
    return _is_activation(path) and _region(path) == "mlp_act" and not any(map(_has_experts, paths))


def _is_dense_mlp(path: str, paths: Iterable[str]) -> bool:
    """Tell whether a child of a layer is an MLP without experts in it."""
    inside = (other for other in paths if other.startswith(f"{path}."))
    is_mlp = "." not in path and _region(path) == "mlp_act" and not _is_activation(path)
    return is_mlp and not any(map(_has_experts, inside))


def _is_moe(path: str, paths: Iterable[str]) -> bool:
    """Tell whether a child of a layer is the block of experts, or holds it."""
    return "." not in path and any(_has_experts(other) for other in paths if f"{other}.".startswith(f"{path}."))


def _is_shared_expert(path: str, _: Iterable[str]) -> bool:
    return _region(path) == "shared_expert" and not path.endswith("_gate")


_MODULES: MappingProxyType[str, tuple[str, Callable[[str, Iterable[str]], bool]]] = MappingProxyType(
    {
        "layernorm": (RECIPE, _is_norm),
        "mlp_act": (RECIPE, _is_dense_activation),
        "mlp": (SUBMODULE, _is_dense_mlp),
        "moe": (SUBMODULE, _is_moe),
        "shared_expert": (SUBMODULE, _is_shared_expert),
    }
)
