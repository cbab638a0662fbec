"""Whether a graph that comes from outside agrees with itself: what is traced does, what was written by hand may not."""

from collections.abc import Iterator

from memopt.ir.graph import FunctionCall, ModuleCall, ModuleGraph, PartCall, SavedTensor
from memopt.ir.regions import REGIONS

Fault = tuple[str, str]
"""(where in the graph, what is wrong there)."""


def first_fault(graph: ModuleGraph) -> Fault | None:
    """Return the first place where a graph contradicts itself."""
    return next(_faults(graph), None)


def _faults(graph: ModuleGraph) -> Iterator[Fault]:
    yield from _module_faults(graph)
    for key, size in (
        ("model.num_parameters", graph.model.num_parameters),
        ("model.parameter_bytes", graph.model.parameter_bytes),
    ):
        yield from _negative(key, size)
    for number, call in enumerate(graph.calls):
        for key, what in _call_faults(graph, number, call):
            yield f"calls.{number}.{key}", what
    for number, tensor in enumerate(graph.saved):
        for key, what in _saved_faults(graph, number, tensor):
            yield f"saved.{number}.{key}", what
    for number, function in enumerate(graph.functions):
        for key, what in _function_faults(graph, function):
            yield f"functions.{number}.{key}", what
    for number, part in enumerate(graph.parts):
        for key, what in _part_faults(graph, part):
            yield f"parts.{number}.{key}", what
    yield from _reference_faults(graph)


def _reference_faults(graph: ModuleGraph) -> Iterator[Fault]:
    for number, fqn in enumerate(graph.checkpointed):
        if fqn not in graph.by_fqn:
            yield f"checkpointed.{number}", f"{fqn!r} is no module"
    for number, flow in enumerate(graph.flows):
        if not all(0 <= call < len(graph.calls) for call in flow):
            yield f"flows.{number}", f"{list(flow)} is no pair of calls; there are {len(graph.calls)}"


def _module_faults(graph: ModuleGraph) -> Iterator[Fault]:
    """Yield what is wrong with the modules: everything else is looked up in them."""
    if not graph.modules or graph.modules[0].fqn:
        yield "modules", "the first is not the root, whose fqn is ''"
    names: set[str] = set()
    for number, node in enumerate(graph.modules):
        if node.fqns[:1] != (node.fqn,):
            yield f"modules.{number}.fqns", f"the first is not the module's fqn {node.fqn!r}"
        if twice := names & set(node.fqns):
            yield f"modules.{number}.fqns", f"{min(twice)!r} is the name of an earlier module"
        names |= set(node.fqns)
        for fqn in filter(None, node.fqns):
            if (parent := fqn.rpartition(".")[0]) not in graph.by_fqn:
                yield f"modules.{number}.fqns", f"{fqn!r} lies in {parent!r}, which is no module"
        yield from _negative(f"modules.{number}.num_parameters", node.num_parameters)
        yield from _negative(f"modules.{number}.parameter_bytes", node.parameter_bytes)


def _call_faults(graph: ModuleGraph, number: int, call: ModuleCall) -> Iterator[Fault]:
    if call.index != number:
        yield "index", f"{call.index} stands at {number}"
    if call.fqn not in graph.by_fqn:
        yield "fqn", f"{call.fqn!r} is no module"
    if call.parent is not None and not 0 <= call.parent < number:
        yield "parent", f"{call.parent} is no earlier call"
    yield from _interval_faults(graph, call)
    yield from _size_faults("inputs", call.inputs)
    yield from _size_faults("outputs", call.outputs)
    yield from _negative("flops", call.flops)


def _function_faults(graph: ModuleGraph, function: FunctionCall) -> Iterator[Fault]:
    if not 0 <= function.call < len(graph.calls):
        yield "call", f"{function.call} is no call; there are {len(graph.calls)}"
    yield from _interval_faults(graph, function)
    yield from _size_faults("outputs", function.outputs)
    yield from _size_faults("statistics", function.statistics)
    yield from _negative("flops", function.flops)


def _part_faults(graph: ModuleGraph, part: PartCall) -> Iterator[Fault]:
    if part.region not in REGIONS:
        yield "region", f"{part.region!r} is no region"
    if not 0 <= part.call < len(graph.calls):
        yield "call", f"{part.call} is no call; there are {len(graph.calls)}"
    yield from _interval_faults(graph, part)
    yield from _size_faults("inputs", part.inputs)
    yield from _size_faults("outputs", part.outputs)


def _interval_faults(graph: ModuleGraph, call: ModuleCall | FunctionCall | PartCall) -> Iterator[Fault]:
    if not 0 <= call.first_save <= call.end_save <= len(graph.saved):
        saves = f"saves {call.first_save} to {call.end_save}"
        yield "end_save", f"{saves} are not within the {len(graph.saved)} of the graph"


def _size_faults(key: str, sizes: tuple[tuple[int, int], ...]) -> Iterator[Fault]:
    for number, pair in enumerate(sizes):
        yield from _negative(f"{key}.{number}", min(pair))


def _saved_faults(graph: ModuleGraph, number: int, tensor: SavedTensor) -> Iterator[Fault]:
    if tensor.index != number:
        yield "index", f"{tensor.index} stands at {number}"
    if not 0 <= tensor.call < len(graph.calls):
        yield "call", f"{tensor.call} is no call; there are {len(graph.calls)}"
    if tensor.owner not in graph.by_fqn:
        yield "owner", f"{tensor.owner!r} is no module"
    for key in ("occurrence", "offset", "tensor_bytes", "storage_bytes"):
        yield from _negative(key, getattr(tensor, key))
    yield from _negative("shape", min(tensor.shape, default=0))


def _negative(key: str, size: int) -> Iterator[Fault]:
    if size < 0:
        yield key, f"{size} is negative"
