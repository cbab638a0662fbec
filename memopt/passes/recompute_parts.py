"""Decide to recompute light parts of layers, whose outputs are not kept either, and whole MLPs."""

from dataclasses import dataclass
from typing import ClassVar

from memopt.errors import IncompatibleError, NothingOfThatKindError
from memopt.ir import OFFLOAD, RECIPE, RECOMPUTABLE, Action, Decision, Plan, RegionKey, recomputable, recompute_names
from memopt.ir.region_search import parts_of_layers
from memopt.passes.base import Pass

_WHY = {
    "layernorm": "a norm is cheap, and its input is saved or moved anyway",
    "moe_act": "the experts' activation is cheap",
    "mlp_act": "the MLP's activation is cheap",
    "mlp": "a dense MLP as a whole",
    "moe": "a block of experts as a whole",
    "shared_expert": "a shared expert as a whole",
}


@dataclass(frozen=True, kw_only=True)
class RecomputeParts(Pass):
    """Recompute parts of every layer by name; what saves the output of a light one saves how to make it instead."""

    name: ClassVar[str] = "recompute-parts"

    modules: tuple[str, ...] = ("layernorm",)
    """``layernorm``, ``moe_act``, ``mlp_act``: light; ``mlp``, ``moe``, ``shared_expert``: whole modules."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", recompute_names("modules", self.modules))

    def run(self, plan: Plan) -> Plan:
        """Decide on every part that the names stand for, and leave alone what is decided already.

        Raises NothingOfThatKindError where the model has none, IncompatibleError beside swap and checkpointing of layers,
        and after fine-grained-offload, which depends on it.
        """
        found = {name: recomputable(plan.graph, name) for name in self.modules}
        if not any(found.values()):
            has = [name for name in RECOMPUTABLE if recomputable(plan.graph, name)]
            parts = parts_of_layers(plan.graph)
            raise NothingOfThatKindError("recompute", plan.graph.model.class_name, self.modules, has, parts)
        wanted = {key: self._decision(name, route) for name, keys in found.items() for key, route in keys.items()}
        if missing := [name for name, keys in found.items() if not keys]:
            plan = plan.note(f"recompute: the model has no {' or '.join(missing)} that saves anything")
        return plan.decide({key: decision for key, decision in wanted.items() if self._is_free(plan, key, decision)})

    def _decision(self, name: str, route: str) -> Decision:
        light = ", and its output is not kept either" if route == RECIPE else ""
        why = f"{name}: {_WHY[name]}{light}"
        return Decision(action=Action.RECOMPUTE, by=self.name, why=why, policy="full", route=route)

    def _is_free(self, plan: Plan, key: RegionKey, wanted: Decision) -> bool:
        """Tell whether nothing is decided on a part, around it or inside it, but for regions that are offloaded by hand.

        Raises IncompatibleError for what other passes decided there, and this one with other options.
        """
        earlier = {other: plan.decisions[other] for other in plan.related_keys(key.fqn)}
        if earlier.get(key) == wanted:
            return False
        for decision in earlier.values():
            if decision.by in _EXCLUDED:
                raise IncompatibleError(f"{self.name} {_EXCLUDED[decision.by]} (both decide on {str(key)!r})")
        if any(decision.by == self.name for decision in earlier.values()):
            raise IncompatibleError(f"{self.name} was run before with other options; give it once")
        return all(decision.policy == OFFLOAD for decision in earlier.values())


_EXCLUDED = {
    "activation-checkpoint": "is incompatible with activation-checkpoint, which recomputes layers; drop one of the two",
    "attention-swap": "is incompatible with attention-swap; offload core_attn and attn_proj instead",
    "fine-grained-offload": "comes before fine-grained-offload, which depends on it; change their order",
}
