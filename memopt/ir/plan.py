"""What was decided about a module graph, by whom and why."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType

from memopt.errors import InvalidPlanError
from memopt.ir.graph import ModuleGraph
from memopt.ir.offload import Offload
from memopt.ir.op_policy import OP_POLICIES
from memopt.ir.policy import POLICIES


class Action(enum.StrEnum):
    """What a saved tensor does between forward and backward."""

    KEEP = "keep"
    SWAP = "swap"
    RECOMPUTE = "recompute"


COMPILE = "compile"
RECIPE = "recipe"
ROUTES = ("native", "submodule", "layer", COMPILE, RECIPE)
"""The ways of the RFC to recompute: as transformers would, parts of a layer, a whole layer, what torch.compile takes.

And one more: a part whose output is not kept either, for who saves it saves how to make it.
"""
OFFLOAD = "offload"
"""The policy of every decision on a region that is offloaded or kept."""


@dataclass(frozen=True, slots=True, order=True)
class RegionKey:
    """What a decision is about: a module, or a named part of a module's forward (`region` is empty for all of it)."""

    fqn: str
    region: str = ""

    def __str__(self) -> str:
        return f"{self.fqn}:{self.region}" if self.region else self.fqn


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One action on one region, who took it and why."""

    action: Action
    by: str
    """The pass's name."""
    why: str
    """Printed as it stands."""
    policy: str
    """Which saved tensors it concerns, a key of `POLICIES`; for RECOMPUTE which results are kept, of `OP_POLICIES`."""
    route: str = ""
    """One of `ROUTES` where a pass decided to recompute; empty for other actions and for a decision by hand."""

    @property
    def compiles(self) -> bool:
        """Whether the rewritten module may be given to torch.compile."""
        return self.route == COMPILE


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Decisions on a graph's regions and the order in which they are prefetched."""

    graph: ModuleGraph
    decisions: Mapping[RegionKey, Decision] = field(default_factory=dict)
    prefetch_chain: tuple[str, ...] = ()
    """FQNs in forward order; backward of each prefetches the one before it."""
    offload: Offload | None = None
    """The settings of fine-grained offload; the defaults hold where regions are decided on without them."""
    notes: tuple[str, ...] = ()
    """What a pass has to say that is not the why of one decision; printed as it stands."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "decisions", MappingProxyType(dict(self.decisions)))

    def decide(self, decisions: Mapping[RegionKey, Decision]) -> "Plan":
        """Return this plan with further decisions; an earlier one on the same region is an InvalidPlanError."""
        for key, decision in decisions.items():
            if (earlier := self.decisions.get(key, decision)) != decision:
                raise InvalidPlanError(
                    f"{str(key)!r} is {earlier.action} by {earlier.by!r}; {decision.by!r} may not change it"
                )
        return replace(self, decisions={**self.decisions, **decisions})

    def note(self, text: str) -> "Plan":
        """Return this plan with a note, which it gets once only."""
        return self if text in self.notes else replace(self, notes=(*self.notes, text))

    def decided(self, fqn: str) -> bool:
        """Tell whether a module, one around it or one inside it has a decision."""
        return bool(self.related(fqn))

    def related(self, fqn: str) -> tuple[Decision, ...]:
        """Return the decisions on a module, on those around it and on those inside it, under any of its names."""
        return tuple(self.decisions[key] for key in self.related_keys(fqn))

    def related_keys(self, fqn: str) -> tuple[RegionKey, ...]:
        """Return what `related` decides on."""
        names = self.graph.by_fqn[fqn].fqns
        return tuple(key for key in self.decisions if any(_related(key.fqn, name) for name in names))

    def verify(self) -> None:
        """Raise an InvalidPlanError for a decision or a chain that the graph does not allow."""
        from memopt.ir.plan_rules import verify_regions  # which needs a plan to be defined

        for key, decision in self.decisions.items():
            self._verify_decision(key, decision)
        verify_regions(self)
        copied = {key.fqn for key, decision in self.decisions.items() if decision.action is not Action.RECOMPUTE}
        copied = {self.graph.by_fqn[fqn].fqn for fqn in copied}
        nodes = {self.graph.by_fqn[key.fqn].fqn for key in self.decisions}
        self._verify_chain([node.fqn for node in self.graph.modules if node.fqn in nodes])
        if stray := [fqn for fqn in self.prefetch_chain if fqn not in copied]:
            raise InvalidPlanError(f"prefetch chain names {stray[0]!r}, which is recomputed: nothing of it is copied")

    def _verify_decision(self, key: RegionKey, decision: Decision) -> None:
        if key.fqn not in self.graph.by_fqn:
            raise InvalidPlanError(f"decision on {str(key)!r}: the model has no such module")
        policies = OP_POLICIES if decision.action is Action.RECOMPUTE else POLICIES
        if decision.policy not in policies and decision.policy != OFFLOAD:
            raise InvalidPlanError(f"decision on {str(key)!r}: no policy is called {decision.policy!r}")
        if decision.action is not Action.RECOMPUTE and decision.route:
            raise InvalidPlanError(f"decision on {str(key)!r}: only what is recomputed has a route")
        if decision.route not in ("", *ROUTES):
            routes = ", ".join(ROUTES)
            raise InvalidPlanError(f"decision on {str(key)!r}: no route is called {decision.route!r}; legal: {routes}")

    def _verify_chain(self, decided: list[str]) -> None:
        """Hold the chain against the decided modules in discovery order."""
        chain = self.prefetch_chain
        if stray := [fqn for fqn in chain if fqn not in decided]:
            raise InvalidPlanError(f"prefetch chain names {stray[0]!r}, on which nothing is decided")
        if len(set(chain)) < len(chain):
            raise InvalidPlanError("prefetch chain names a module twice")
        for before, after in pairwise(chain):
            if decided.index(before) > decided.index(after):
                raise InvalidPlanError(f"prefetch chain has {before!r} before {after!r}; forward discovers it after")


def enclosing(fqn: str) -> set[str]:
    """Return the names of the modules around a module, the root aside."""
    parts = fqn.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts))}


def _related(one: str, other: str) -> bool:
    return one == other or one in enclosing(other) or other in enclosing(one)
