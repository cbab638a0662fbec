"""What a graph says about a layer that is to be recomputed."""

from collections import Counter
from collections.abc import Iterable, Sequence

from memopt.ir.containers import Container
from memopt.ir.graph import FunctionCall, Kind, KvSharing, ModuleGraph, ModuleNode
from memopt.ir.op_policy import Family, OpPolicy
from memopt.ir.plan import enclosing
from memopt.ir.stacks import is_a
from memopt.units import count_noun


def saves_activations(graph: ModuleGraph, fqn: str) -> bool:
    """Tell whether autograd saves more in a module than what is there anyway: in a frozen one it may not."""
    return any(tensor.kind not in (Kind.PARAMETER, Kind.BUFFER) for tensor in graph.saved_in(fqn))


def why_not_native(graph: ModuleGraph, containers: Sequence[Container]) -> str | None:
    """Return why transformers' own checkpointing of whole layers does not fit a model, None where it does."""
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
    return None if untrained is None else f"{untrained} is not fully trainable"


def why_not_kept(graph: ModuleGraph, fqns: Iterable[str], policy: OpPolicy) -> tuple[str, ...]:
    """Return which results a policy always keeps and cannot keep in some modules, and why: a sentence a reason."""
    around = set(fqns)
    calls: Counter[tuple[Family, str]] = Counter()
    for function in graph.functions:
        fqn = graph.calls[function.call].fqn
        if function.family in policy.always and not function.keepable and around & {fqn, *enclosing(fqn)}:
            calls[function.family, _why_not_kept(function)] += 1
    return tuple(
        f"{count_noun(number, 'call')} of {family.value} {'run' if number > 1 else 'runs'} twice, the result not kept: {why}"
        for (family, why), number in calls.items()
    )


def outermost_of(graph: ModuleGraph, fqns: Iterable[str]) -> tuple[str, ...]:
    """Return those of several modules that lie in none of the others, under any of their names."""
    fqns = tuple(fqns)
    names = {name for fqn in fqns for name in graph.by_fqn[fqn].fqns}
    return tuple(fqn for fqn in fqns if not any(enclosing(name) & names for name in graph.by_fqn[fqn].fqns))


def _why_not_kept(function: FunctionCall) -> str:
    made = sum(size for _, size in function.outputs)
    if 2 * sum(size for _, size in function.statistics) <= made:
        return "it draws random numbers (dropout), or something writes to it or to what it is made of"
    kernel = " (SDPA's math kernel does, with all its probabilities)" if function.family is Family.ATTENTION else ""
    return f"the kernel saves more than it returns{kernel}"


def _is_trained(graph: ModuleGraph, fqn: str) -> bool:
    return all(node.num_trainable == node.num_parameters for node in graph.modules if _is_within(node, fqn))


def _is_within(node: ModuleNode, fqn: str) -> bool:
    return any(f"{name}.".startswith(f"{fqn}.") for name in node.fqns)
