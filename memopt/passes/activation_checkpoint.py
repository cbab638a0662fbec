"""Decide to recompute layers, or parts of them, in backward (RFC "activation checkpoint")."""

from dataclasses import dataclass
from typing import ClassVar

from memopt.errors import (
    OFFLOAD_AND_CHECKPOINT,
    SWAP_AND_CHECKPOINT,
    IllegalValueError,
    IncompatibleError,
    NothingToCheckpointError,
)
from memopt.ir import (
    COMPILE,
    OFFLOAD,
    OP_POLICIES,
    Action,
    Container,
    Decision,
    KvSharing,
    ModuleGraph,
    Plan,
    RegionKey,
    layer_containers,
    layer_parts,
    outermost_of,
    saves_activations,
    why_not_kept,
    why_not_native,
)
from memopt.passes.attention_swap import AttentionSwap
from memopt.passes.base import Pass
from memopt.passes.recompute_parts import RecomputeParts

MODES = ("full", "selective", "attention-only")
_WHY_WHOLE = {
    "full": "every layer is a fully trainable GradientCheckpointingLayer",
    "selective": "results of expensive functions are kept, of matrix products every other",
    "attention-only": "the results of attention are kept",
}
DOWNGRADED = (
    "selective checkpointing is downgraded: layers share keys and values through the cache, which attention may fill "
    "only once; MLPs and norms are recomputed in full, attention is not"
)


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpoint(Pass):
    """Recompute every layer in which autograd saves something, or the parts of it that may run twice."""

    name: ClassVar[str] = "activation-checkpoint"

    mode: str = "full"
    """``full`` recomputes everything; ``selective`` keeps results of expensive functions, ``attention-only`` attention's."""
    compiles: bool = False
    """Whether the layers are given to torch.compile: then norms are left alone, which it fuses."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise IllegalValueError("mode", self.mode, ", ".join(MODES))
        if not isinstance(self.compiles, bool):
            raise IllegalValueError("compiles", self.compiles, "true, false")

    def run(self, plan: Plan) -> Plan:
        """Decide on every layer, and leave alone what is decided already.

        Raises NoLayerContainerError, NothingToCheckpointError, and IncompatibleError where attention is swapped, or
        where this pass has decided otherwise with other options.
        """
        graph = plan.graph
        containers = layer_containers(graph)
        layers = [layer for container in containers for layer in container.layers]
        saving = [layer for layer in layers if saves_activations(graph, layer)]
        wanted = self._wanted(graph, saving, self._why_parts(graph, containers))
        num_silent = len(layers) - len(saving)
        if not wanted:
            checkpointed = set(layers).difference(saving).intersection(graph.checkpointed)
            raise NothingToCheckpointError(
                graph.model.class_name,
                num_layers=len(layers),
                num_silent=num_silent,
                num_checkpointed=len(checkpointed),
                num_uncalled=sum(not graph.calls_of(layer) for layer in layers),
            )
        if num_silent:
            plan = plan.note(f"{num_silent} of {len(layers)} layers save nothing for backward and stay as they are")
        if self.mode != "full" and _shares_cache(graph):
            plan = plan.note(DOWNGRADED)
        decisions = {fqn: decision for fqn, decision in wanted.items() if _is_free(plan, fqn, decision)}
        whole = [fqn for fqn, decision in decisions.items() if decision.policy == self.mode]
        for sentence in why_not_kept(graph, whole, OP_POLICIES[self.mode]):
            plan = plan.note(sentence)
        return plan.decide({RegionKey(fqn): decision for fqn, decision in decisions.items()})

    def _why_parts(self, graph: ModuleGraph, containers: tuple[Container, ...]) -> str | None:
        """Return why layers are recomputed part by part, None where they are as a whole."""
        if _shares_cache(graph):
            return "layers share keys and values through the cache, which attention may fill only once"
        if self.mode != "full":
            return None
        return "torch.compile fuses the rest of a layer" if self.compiles else why_not_native(graph, containers)

    def _wanted(self, graph: ModuleGraph, layers: list[str], why_parts: str | None) -> dict[str, Decision]:
        """Return the decisions on layers that save something, whatever was decided before."""
        decisions: dict[str, Decision] = {}
        for layer in layers:
            decisions |= {layer: self._on_whole()} if why_parts is None else self._on_parts(graph, layer, why_parts)
        return {fqn: decisions[fqn] for fqn in outermost_of(graph, decisions)}

    def _on_whole(self) -> Decision:
        return self._recompute("native" if self.mode == "full" else "layer", _WHY_WHOLE[self.mode], policy=self.mode)

    def _on_parts(self, graph: ModuleGraph, layer: str, why: str) -> dict[str, Decision]:
        """Return the decisions on a layer's parts; where it has none, on all of it, unless it may hold attention."""
        parts = layer_parts(graph, layer, compiled=self.compiles)
        if not parts and not _shares_cache(graph):
            why = "it has no part of a known name, so that all of it is recomputed"
            return {layer: self._recompute("layer", why, policy=self.mode)}
        return {
            fqn: self._recompute("submodule", f"{role}, because {why}", policy="full")
            for role, fqn in parts
            if saves_activations(graph, fqn) and not (role == "attention" and _shares_cache(graph))
        }

    def _recompute(self, route: str, why: str, *, policy: str) -> Decision:
        return Decision(
            action=Action.RECOMPUTE,
            by=self.name,
            why=why,
            policy=policy,
            route=COMPILE if self.compiles else route,
        )


def _shares_cache(graph: ModuleGraph) -> bool:
    return graph.model.kv_sharing is KvSharing.CACHE


def _is_free(plan: Plan, fqn: str, wanted: Decision) -> bool:
    """Tell whether nothing is decided on a module, around it or inside it.

    Raises IncompatibleError for a swap, and for what this pass decided there with other options.
    """
    earlier = plan.related(fqn)
    if any(decision.by == wanted.by and decision != wanted for decision in earlier):
        raise IncompatibleError(
            f"{wanted.by} was run before with other options, and decided otherwise on {fqn!r}; give it once"
        )
    if any(decision.policy == OFFLOAD or decision.by == RecomputeParts.name for decision in earlier):
        raise IncompatibleError(OFFLOAD_AND_CHECKPOINT)
    if any(decision.action is Action.SWAP or decision.by == AttentionSwap.name for decision in earlier):
        raise IncompatibleError(SWAP_AND_CHECKPOINT)
    return not earlier
