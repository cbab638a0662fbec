"""What a graph says about a layer that is to be recomputed."""

from collections.abc import Iterable, Sequence

from memopt.ir.containers import Container
from memopt.ir.graph import Kind, KvSharing, ModuleGraph, ModuleNode
from memopt.ir.plan import enclosing
from memopt.ir.stacks import is_a


def saves_activations(graph: ModuleGraph, fqn: str) -> bool:
    """Tell whether autograd saves more in a module than what is there anyway: in a frozen one it may not."""
    return any(tensor.kind not in (Kind.PARAMETER, Kind.BUFFER) for tensor in graph.saved_in(fqn))


def why_not_native(graph: ModuleGraph, containers: Sequence[Container]) -> str:
    """Return why transformers' own checkpointing of whole layers does not fit a model; empty where it does."""
    layers = [layer for container in containers for layer in container.layers]
    plain = next((fqn for fqn in layers if not is_a(graph.by_fqn[fqn], "GradientCheckpointingLayer")), None)
    untrained = next((fqn for fqn in layers if not _is_trained(graph, fqn)), None)
    if len(containers) > 1:
        return f"the model has {len(containers)} towers"
    if graph.model.kv_sharing is KvSharing.CACHE:
        return "layers share keys and values through the cache"
    if not graph.model.native_checkpointing:
        return f"{graph.model.class_name} does not support gradient checkpointing"
    if plain is not None:
        return f"{plain} is no GradientCheckpointingLayer"
    return "" if untrained is None else f"{untrained} is not fully trainable"


def outermost_of(graph: ModuleGraph, fqns: Iterable[str]) -> tuple[str, ...]:
    """Return those of several modules that lie in none of the others, under any of their names."""
    fqns = tuple(fqns)
    names = {name for fqn in fqns for name in graph.by_fqn[fqn].fqns}
    return tuple(fqn for fqn in fqns if not any(enclosing(name) & names for name in graph.by_fqn[fqn].fqns))


def _is_trained(graph: ModuleGraph, fqn: str) -> bool:
    return all(node.num_trainable == node.num_parameters for node in graph.modules if _is_within(node, fqn))


def _is_within(node: ModuleNode, fqn: str) -> bool:
    return any(f"{name}.".startswith(f"{fqn}.") for name in node.fqns)
