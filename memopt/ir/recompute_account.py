"""What recomputing regions drops, what it holds for the replay, and what it runs again."""

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

from memopt.ir.graph import FunctionCall, Kind, ModuleCall, ModuleGraph, SavedTensor
from memopt.ir.op_policy import OP_POLICIES, Family, OpPolicy
from memopt.ir.plan import Action, Plan
from memopt.ir.replay import Replay, own_storages, replay_of

IS_LAST = "saved last"
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
    last_bytes: int
    """Of the last saves, which may stay: the replay ends before them."""
    flops: int
    """Of its forward."""
    repeated_flops: int
    """Of those that backward runs a second time."""

    @property
    def result_bytes(self) -> int:
        """Of everything that it keeps besides its inputs."""
        return sum(kept.num_bytes for kept in self.results) + self.last_bytes


class Regions:
    """The recomputed regions of a plan, and the storages that the device holds for them and beside them."""

    def __init__(self, plan: Plan, *, gone: Set[int] = frozenset()) -> None:
        """Find the regions; `gone` are saves that leave the device otherwise."""
        self._graph = graph = plan.graph
        self._ends = _subtree_ends(graph)
        self.replays: dict[str, tuple[Replay, ...]] = {}
        for key, decision in plan.decisions.items():
            if decision.action is Action.RECOMPUTE:
                self.replays[key.fqn] = tuple(self._replays(key.fqn, OP_POLICIES[decision.policy]))
        replays = [replay for replays in self.replays.values() for replay in replays]
        self.inputs = dict(pair for replay in replays for pair in replay.call.inputs)
        self.results = dict(pair for r in replays for f in r.kept for pair in own_storages(f).items())
        self.last = {t.storage: t.storage_bytes for r in replays for t in r.tail if t.storage not in self.results}
        saved = {tensor.storage for tensor in graph.saved}
        needed = {**self.inputs, **self.results}
        self.added = {key: size for key, size in needed.items() if key not in saved | graph.held}
        """Storage -> bytes of inputs and results that would be free between forward and backward."""
        self.inside = {n for replay in replays for n in range(replay.call.first_save, replay.call.end_save)}
        """The saves in them."""
        self.needed = {**needed, **self.last}
        """Storage -> bytes of all that they hold."""
        self.held = graph.held | self.needed.keys()
        self.held |= {t.storage for t in graph.saved if t.index not in self.inside and t.index not in gone}

    def saved(self, fqn: str) -> tuple[SavedTensor, ...]:
        """Return what autograd saves in a region, over all its calls."""
        calls = (replay.call for replay in self.replays[fqn])
        return tuple(t for call in calls for t in self._graph.saved[call.first_save : call.end_save])

    def why_kept(self, tensor: SavedTensor) -> str:
        """Return why a saved tensor of a region stays on the device; empty where backward makes it again."""
        if tensor.kind in (Kind.PARAMETER, Kind.BUFFER):
            return tensor.kind.value
        if tensor.storage in self.results:
            return IS_RESULT
        if tensor.storage in self.inputs:
            return IS_INPUT
        return IS_LAST if tensor.storage in self.last else ""

    def account(self, fqn: str, *, route: str, policy: str) -> RecomputeAccount:
        """Return what recomputing one module means."""
        replays = self.replays[fqn]
        last = {t.storage: t.storage_bytes for replay in replays for t in replay.tail if t.storage in self.last}
        return RecomputeAccount(
            route=route,
            policy=policy,
            num_calls=len(replays),
            input_bytes=sum(dict(pair for replay in replays for pair in replay.call.inputs).values()),
            results=_by_family(function for replay in replays for function in replay.kept),
            last_bytes=sum(last.values()),
            replay_bytes=max((self._replay_bytes(replay.call) for replay in replays), default=0),
            flops=sum(replay.call.flops for replay in replays),
            repeated_flops=sum(replay.repeated_flops for replay in replays),
        )

    def _replay_bytes(self, call: ModuleCall) -> int:
        saved = self._graph.saved[call.first_save : call.end_save]
        return sum({t.storage: t.storage_bytes for t in saved if not self.why_kept(t)}.values())

    def _replays(self, fqn: str, policy: OpPolicy) -> Iterator[Replay]:
        """Yield the calls of a module that are replayed: those in which something is saved, but for calls within calls."""
        end = 0
        for call in self._graph.calls_of(fqn):
            if call.first_save < call.end_save and call.first_save >= end:
                inside = range(call.index, self._ends[call.index])
                functions = (function for function in self._graph.functions if function.call in inside)
                yield replay_of(self._graph, call, functions, policy)
                end = call.end_save


def _subtree_ends(graph: ModuleGraph) -> list[int]:
    """Return for each call the number of the first one after it that is not inside it."""
    ends = [call.index + 1 for call in graph.calls]
    for call in reversed(graph.calls):
        if call.parent is not None:
            ends[call.parent] = max(ends[call.parent], ends[call.index])
    return ends


def _by_family(functions: Iterable[FunctionCall]) -> tuple[KeptResults, ...]:
    """Add up kept functions, each storage once: where it is first returned."""
    sizes: dict[Family, list[dict[int, int]]] = {}
    seen: set[int] = set()
    for function in functions:
        new = {key: size for key, size in own_storages(function).items() if key not in seen}
        seen |= new.keys()
        sizes.setdefault(function.family, []).append(new)
    return tuple(
        KeptResults(family=family, num_calls=len(news), num_bytes=sum(sum(new.values()) for new in news))
        for family, news in sizes.items()
    )
