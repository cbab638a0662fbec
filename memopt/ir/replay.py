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
    """The last saves, which are small, lie on kept results or replace the last of these: the replay ends before them."""
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
    stop = _stop(graph, call, kept, tail)
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
    """Return the last saves that may be kept."""
    tail = _Tail(graph)
    todo = list(reversed(wanted))
    for tensor in graph.saved[call.first_save : call.end_save]:
        while todo and todo[-1].end_save <= tensor.index:
            tail.pass_(todo.pop())
        if not (todo and todo[-1].first_save <= tensor.index):
            tail.note(tensor)
    for function in reversed(todo):
        tail.pass_(function)
    return tuple(tail.saves)


class _Tail:
    """The last saves that may be kept, up to some place in a region."""

    def __init__(self, graph: ModuleGraph) -> None:
        self.saves: list[SavedTensor] = []
        self._graph = graph
        self._results: set[int] = set()
        self._budget_bytes = 0
        """What of the last result may be taken by saves after it, in its place."""

    def pass_(self, function: FunctionCall) -> None:
        """Take note of a function that has returned: the replay must come to it, for what it saves of its operands."""
        own = own_storages(function)
        saves = self._graph.saved[function.first_save : function.end_save]
        if function.keepable:
            self._results.update(own)
        if any(tensor.storage not in own for tensor in saves):
            self.saves.clear()
            is_free = function.keepable and not any(tensor.storage in own for tensor in saves)
            self._budget_bytes = sum(own.values()) if is_free else 0

    def note(self, tensor: SavedTensor) -> None:
        """Keep a save for the time being, or give up those before it."""
        if tensor.storage not in self._results and tensor.storage_bytes > MAX_TAIL_TENSOR_BYTES:
            self._budget_bytes -= tensor.storage_bytes
            if self._budget_bytes < 0:
                self.saves.clear()
                self._budget_bytes = 0
                return
        self.saves.append(tensor)


def _is_used(graph: ModuleGraph, call: ModuleCall, function: FunctionCall, tail: tuple[SavedTensor, ...]) -> bool:
    """Tell whether backward reads a result, or a replay can do with it."""
    own = own_storages(function)
    read = (*graph.saved[function.first_save : function.end_save], *tail)
    return function.end_save < call.end_save - len(tail) or any(tensor.storage in own for tensor in read)


def _stop(graph: ModuleGraph, call: ModuleCall, kept: tuple[FunctionCall, ...], tail: tuple[SavedTensor, ...]) -> int:
    """Return at which save the replay ends: at the last before the tail, or at the first after those that are missing."""
    held = {tensor.index for tensor in tail}
    for function in kept:
        own = own_storages(function)
        held |= {t.index for t in graph.saved[function.first_save : function.end_save] if t.storage in own}
    missing = (index for index in reversed(range(call.first_save, call.end_save)) if index not in held)
    last = next(missing, None)
    if last is None:
        return -1  # no replay
    return min(last + 1, call.end_save - len(tail) - 1)


def _runs_again(graph: ModuleGraph, function: FunctionCall, stop: int) -> bool:
    """Tell whether a replay computes a function's results: its operands are saved before that, its results after it."""
    if function.first_save <= stop < function.end_save:
        return graph.saved[stop].storage in own_storages(function)
    return function.end_save <= stop
