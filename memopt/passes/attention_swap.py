"""Decide to swap what attention saves to pinned host memory (RFC "attention activation swap")."""

from dataclasses import dataclass
from typing import ClassVar

from memopt.errors import (
    OFFLOAD_AND_SWAP,
    SWAP_AND_CHECKPOINT,
    IllegalValueError,
    IncompatibleError,
    NoSelfAttentionError,
)
from memopt.ir import OFFLOAD, RECIPE, Action, Decision, Plan, RegionKey, account, outermost
from memopt.passes.base import Pass
from memopt.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class AttentionSwap(Pass):
    """Swap what every module registered as ``self_attn`` saves, where the attention policy passes it."""

    name: ClassVar[str] = "attention-swap"

    margin_bytes: int | None = None
    """Keep the last targets on the device up to this many bytes: they would go out and come straight back.

    None keeps the last target and no other.
    """

    def __post_init__(self) -> None:
        if self.margin_bytes is not None and not (type(self.margin_bytes) is int and self.margin_bytes >= 0):
            raise IllegalValueError("margin_bytes", self.margin_bytes, "None or a whole number of bytes from 0")

    def run(self, plan: Plan) -> Plan:
        """Decide on every target; raises NoSelfAttentionError if there is none, IncompatibleError for a recomputed one."""
        targets = outermost(plan.graph, "self_attn")
        if not targets:
            raise NoSelfAttentionError(plan.graph.model.class_name)
        related = [decision for fqn in targets for decision in plan.related(fqn)]
        if any(decision.policy == OFFLOAD or decision.route == RECIPE for decision in related):
            raise IncompatibleError(OFFLOAD_AND_SWAP)
        if any(decision.route for decision in related):  # a pass recomputes it
            raise IncompatibleError(SWAP_AND_CHECKPOINT)
        swap = Decision(action=Action.SWAP, by=self.name, why="registered as self_attn", policy="attention")
        all_swapped = plan.decide({RegionKey(fqn): swap for fqn in targets if not plan.decided(fqn)})
        kept = self._margin(all_swapped)
        return plan.decide(
            {
                key: kept.get(key.fqn, decision)
                for key, decision in all_swapped.decisions.items()
                if key not in plan.decisions
            }
        )

    def _margin(self, plan: Plan) -> dict[str, Decision]:
        """Return the decisions of the last targets, which stay on the device."""
        targets = [t for t in account(plan).targets if plan.decisions[RegionKey(t.fqn)].by == self.name]
        if not targets:
            return {}
        budget = self.margin_bytes
        if budget is None:
            budget = targets[-1].covered_bytes
        kept: dict[str, Decision] = {}
        for target in reversed([target for target in targets if target.covered_bytes]):
            if target.covered_bytes > budget:
                break
            budget -= target.covered_bytes
            why = f"margin: the last {format_bytes(target.covered_bytes)} would come straight back"
            kept[target.fqn] = Decision(action=Action.KEEP, by=self.name, why=why, policy="attention")
        return kept
