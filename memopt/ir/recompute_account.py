"""What recomputing regions drops, what it holds for the replay, and what it runs again."""

from collections.abc import Iterator
from dataclasses import dataclass

from memopt.ir.graph import FunctionCall, Kind, ModuleCall, ModuleGraph, SavedTensor
from memopt.ir.op_policy import OP_POLICIES, Family, OpPolicy
from memopt.ir.plan import Action, Plan

RUNS_AGAIN = "made again in backward"
IS_INPUT = "input of a region"
IS_RESULT = "kept result"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptResults:
    """The results of one family of functions that a region keeps instead of computing them twice."""

    family: Family
    num_calls: int
    num_bytes: int
    """Small statistics included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeAccount:
    """What recomputing one module means over all its calls in which something is saved."""

    route: str
    policy: str
    num_calls: int
    input_bytes: int
    """Of what it is called with: held for the replay, each storage once."""
    results: tuple[KeptResults, ...]
    replay_bytes: int
    """What backward makes again at once: in the call of it that drops most."""
    flops: int
    """Of its forward."""
    repeated_flops: int
    """Of those that backward runs a second time."""

    @property
    def result_bytes(self) -> int:
        """Of everything that it keeps besides its inputs."""
        return sum(kept.num_bytes for kept in self.results)


class Regions:
    """The recomputed regions of a plan, and the storages that the device holds for them and beside them."""

    def __init__(self, plan: Plan) -> None:
        self._graph = graph = plan.graph
        self._ends = _subtree_ends(graph)
        self.calls: dict[str, tuple[ModuleCall, ...]] = {}
        self.kept: dict[str, tuple[FunctionCall, ...]] = {}
        for key, decision in plan.decisions.items():
            if decision.action is Action.RECOMPUTE:
                calls = self.calls[key.fqn] = tuple(_replayed(graph, key.fqn))
                policy = OP_POLICIES[decision.policy]
                self.kept[key.fqn] = tuple(function for call in calls for function in self._kept(call, policy))
        self.inputs = dict(pair for calls in self.calls.values() for call in calls for pair in call.inputs)
        functions = [function for kept in self.kept.values() for function in kept]
        self.results = dict(pair for f in functions for pair in (*f.outputs, *f.statistics))
        inside = {n for calls in self.calls.values() for c in calls for n in range(c.first_save, c.end_save)}
        saved = {tensor.storage for tensor in graph.saved}
        needed = {**self.inputs, **self.results}
        self.added = {key: size for key, size in needed.items() if key not in saved | graph.held}
        """Storage -> bytes of inputs and results that would be free between forward and backward."""
        self.held = graph.held | self.inputs.keys() | self.results.keys()
        self.held |= {tensor.storage for tensor in graph.saved if tensor.index not in inside}

    def saved(self, fqn: str) -> tuple[SavedTensor, ...]:
        """Return what autograd saves in a region, over all its calls."""
        return tuple(t for call in self.calls[fqn] for t in self._graph.saved[call.first_save : call.end_save])

    def why_kept(self, tensor: SavedTensor) -> str:
        """Return why a saved tensor of a region stays on the device; empty where backward makes it again."""
        if tensor.kind in (Kind.PARAMETER, Kind.BUFFER):
            return tensor.kind.value
        if tensor.storage in self.results:
            return IS_RESULT
        return IS_INPUT if tensor.storage in self.inputs else ""

    def account(self, fqn: str, *, route: str, policy: str) -> RecomputeAccount:
        """Return what recomputing one module means."""
        calls, kept = self.calls[fqn], self.kept[fqn]
        flops = sum(call.flops for call in calls)
        return RecomputeAccount(
            route=route,
            policy=policy,
            num_calls=len(calls),
            input_bytes=sum(dict(pair for call in calls for pair in call.inputs).values()),
            results=_by_family(kept),
            replay_bytes=max(map(self._replay_bytes, calls), default=0),
            flops=flops,
            repeated_flops=flops - sum(function.flops for function in kept),
        )

    def _replay_bytes(self, call: ModuleCall) -> int:
        saved = self._graph.saved[call.first_save : call.end_save]
        return sum({t.storage: t.storage_bytes for t in saved if not self.why_kept(t)}.values())

    def _kept(self, region: ModuleCall, policy: OpPolicy) -> Iterator[FunctionCall]:
        """Yield the functions of one call whose results are kept: the policy's, where something is saved after them."""
        num_alternate = 0
        for function in self._graph.functions:
            if not region.index <= function.call < self._ends[region.index]:
                continue
            wanted = function.family in policy.always
            if function.family in policy.alternate:
                wanted = num_alternate % 2 == 0
                num_alternate += 1
            if wanted and function.keepable and function.end_save < region.end_save:
                yield function


def _replayed(graph: ModuleGraph, fqn: str) -> Iterator[ModuleCall]:
    """Yield the calls of a module that are replayed: those in which something is saved, but for calls within calls."""
    end = 0
    for call in graph.calls_of(fqn):
        if call.first_save < call.end_save and call.first_save >= end:
            yield call
            end = call.end_save


def _subtree_ends(graph: ModuleGraph) -> list[int]:
    """Return for each call the number of the first one after it that is not inside it."""
    ends = [call.index + 1 for call in graph.calls]
    for call in reversed(graph.calls):
        if call.parent is not None:
            ends[call.parent] = max(ends[call.parent], ends[call.index])
    return ends


def _by_family(functions: tuple[FunctionCall, ...]) -> tuple[KeptResults, ...]:
    """Add up kept functions, each storage once: where it is first returned."""
    sizes: dict[Family, list[dict[int, int]]] = {}
    seen: set[int] = set()
    for function in functions:
        new = {key: size for key, size in (*function.outputs, *function.statistics) if key not in seen}
        seen |= new.keys()
        sizes.setdefault(function.family, []).append(new)
    return tuple(
        KeptResults(family=family, num_calls=len(news), num_bytes=sum(sum(new.values()) for new in news))
        for family, news in sizes.items()
    )
