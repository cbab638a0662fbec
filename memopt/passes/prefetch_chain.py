"""Decide in which order what was swapped comes back."""

from dataclasses import dataclass, replace
from typing import ClassVar

from memopt.ir import Action, Plan
from memopt.passes.base import Pass


@dataclass(frozen=True, kw_only=True)
class PrefetchChain(Pass):
    """Chain what is swapped in discovery order: backward of each prefetches the one before it."""

    name: ClassVar[str] = "prefetch-chain"

    def run(self, plan: Plan) -> Plan:
        """Return the plan with its chain; a kept target stays a link, its backward starts the first prefetch."""
        copied = [key.fqn for key, decision in plan.decisions.items() if decision.action is not Action.RECOMPUTE]
        links = {plan.graph.by_fqn[fqn].fqn for fqn in copied}
        return replace(plan, prefetch_chain=tuple(node.fqn for node in plan.graph.modules if node.fqn in links))
