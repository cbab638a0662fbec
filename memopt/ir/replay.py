"""What the runtime keeps of one call of a recomputed region, and where its replay ends: its rules, on facts."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from memopt.ir.graph import FunctionCall, ModuleCall, ModuleGraph, SavedTensor
from memopt.ir.op_policy import OpPolicy

MAX_TAIL_TENSOR_BYTES = 1 << 20
"""How large a save at the end of a region may be to be kept: indices and weights of a router are, activations are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One call of a region as its backward will run it again."""

    call: ModuleCall
    kept: tuple[FunctionCall, ...]
    """The functions whose results stand for them."""
    tail: tuple[SavedTensor, ...]
    """The last saves, which are small or lie on kept results: the replay ends before them."""
    repeated_flops: int


def replay_of(graph: ModuleGraph, call: ModuleCall, functions: Iterable[FunctionCall], policy: OpPolicy) -> Replay:
    """Return what is kept of a call with those functions in it, and what its replay runs."""
    functions = tuple(functions)
    if policy.always or policy.alternate:
        wanted = tuple(_wanted(functions, policy))
        tail = _tail(graph, call, wanted)
        kept = tuple(f for f in wanted if f.keepable and _is_used(graph, call, f, tail))
    else:
        tail, kept = (), ()
    stop = _stop(graph, call, kept, {tensor.index for tensor in tail})
    idle = sum(f.flops for f in functions if f in kept or not _runs_again(graph, f, stop))
    return Replay(call=call, kept=kept, tail=tail, repeated_flops=call.flops - idle)


def own_storages(function: FunctionCall) -> dict[int, int]:
    """Return the storages that a function made, with their bytes: its results and its statistics."""
    return dict((*function.outputs, *function.statistics))


def _wanted(functions: Iterable[FunctionCall], policy: OpPolicy) -> Iterator[FunctionCall]:
    """Yield the functions that a policy names, of the alternating ones the first, the third and so on."""
    num_alternating = 0
    for function in functions:
        if function.family in policy.always:
            yield function
        elif function.family in policy.alternate:
            num_alternating += 1
            if num_alternating % 2:
                yield function


def _tail(graph: ModuleGraph, call: ModuleCall, wanted: tuple[FunctionCall, ...]) -> tuple[SavedTensor, ...]:
    """Return the last saves that may be kept; a function that is kept makes what it saves from its operands."""
    results: set[int] = set()
    tail: list[SavedTensor] = []
    todo = list(reversed(wanted))
    for tensor in graph.saved[call.first_save : call.end_save]:
        while todo and todo[-1].end_save <= tensor.index:
            _pass(graph, todo.pop(), results, tail)
        if todo and todo[-1].first_save <= tensor.index:
            continue
        if tensor.storage not in results and tensor.storage_bytes > MAX_TAIL_TENSOR_BYTES:
            tail.clear()
        else:
            tail.append(tensor)
    while todo:
        _pass(graph, todo.pop(), results, tail)
    return tuple(tail)


def _pass(graph: ModuleGraph, function: FunctionCall, results: set[int], tail: list[SavedTensor]) -> None:
    """Take note of a function that has returned: the replay must come to it, to make what it saves of its operands."""
    own = own_storages(function)
    if function.keepable:
        results.update(own)
    if any(tensor.storage not in own for tensor in graph.saved[function.first_save : function.end_save]):
        tail.clear()


def _is_used(graph: ModuleGraph, call: ModuleCall, function: FunctionCall, tail: tuple[SavedTensor, ...]) -> bool:
    """Tell whether backward reads a result, or a replay can do with it."""
    own = own_storages(function)
    read = (*graph.saved[function.first_save : function.end_save], *tail)
    return function.end_save < call.end_save - len(tail) or any(tensor.storage in own for tensor in read)


def _stop(graph: ModuleGraph, call: ModuleCall, kept: tuple[FunctionCall, ...], tail: set[int]) -> int:
    """Return at which save the replay ends: at the last one of all, or at the first after those that are missing."""
    held = set(tail)
    for function in kept:
        own = own_storages(function)
        held |= {t.index for t in graph.saved[function.first_save : function.end_save] if t.storage in own}
    missing = (index for index in reversed(range(call.first_save, call.end_save)) if index not in held)
    last = next(missing, None)
    if last is None:
        return -1  # no replay
    return min(last + 1, call.end_save - 1)


def _runs_again(graph: ModuleGraph, function: FunctionCall, stop: int) -> bool:
    """Tell whether a replay computes a function's results: its operands are saved before that, its results after it."""
    if function.first_save <= stop < function.end_save:
        return graph.saved[stop].storage in own_storages(function)
    return function.end_save <= stop
