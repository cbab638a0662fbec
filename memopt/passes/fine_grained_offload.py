"""Decide which regions of layers go to pinned host memory, and which of them stay after all."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from memopt.errors import OFFLOAD_AND_CHECKPOINT, OFFLOAD_AND_SWAP, IncompatibleError, NothingOfThatKindError
from memopt.ir import (
    DEFAULT_MIN_ELEMENTS,
    OFFLOAD,
    Action,
    Decision,
    Fates,
    Group,
    Offload,
    Plan,
    RegionKey,
    Seen,
    check_count,
    check_fraction,
    check_inflight,
    check_margin,
    find_groups,
    kept_groups,
    offload_names,
)
from memopt.ir.region_search import parts_of_layers
from memopt.passes.activation_checkpoint import ActivationCheckpoint
from memopt.passes.attention_swap import AttentionSwap
from memopt.passes.base import Pass


@dataclass(frozen=True, kw_only=True)
class FineGrainedOffload(Pass):
    """Offload named regions of every layer, and what modules of a pattern save; the last ones and others may stay."""

    name: ClassVar[str] = "fine-grained-offload"

    modules: tuple[str, ...] = ("core_attn", "attn_proj")
    """Regions, and ``module:PATTERN``."""
    min_tensor_elements: int = DEFAULT_MIN_ELEMENTS
    """Smaller tensors stay. A count of elements, not of bytes."""
    fraction: float = 1.0
    """Of the groups that have something to offload, how many leave; the last stay."""
    max_inflight: int | None = None
    """How many layers may be on their way out before the computation waits for the oldest; None is no limit."""
    pp_rank: int = 0
    pp_rank_delta_bytes: int = 0
    """Pipeline rank r keeps the first groups up to r times as much."""
    margin: int | Literal["auto"] = "auto"
    """What stays at the end: the last group of each region, or the last groups within so many bytes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", offload_names("modules", self.modules))
        for key in ("min_tensor_elements", "pp_rank", "pp_rank_delta_bytes"):
            check_count(key, getattr(self, key))
        check_fraction("fraction", self.fraction)
        check_inflight("max_inflight", self.max_inflight)
        check_margin("margin", self.margin)

    @property
    def settings(self) -> Offload:
        """Return what the plan keeps of the options, for the runtime and for another plan."""
        return Offload(
            min_tensor_elements=self.min_tensor_elements,
            fraction=self.fraction,
            max_inflight=self.max_inflight,
            pp_rank=self.pp_rank,
            pp_rank_delta_bytes=self.pp_rank_delta_bytes,
            margin=self.margin,
        )

    def run(self, plan: Plan) -> Plan:
        """Decide on every group, and leave alone what is decided already.

        Raises UnmatchedPatternError, NothingOfThatKindError where the model has none of the regions, and IncompatibleError
        beside attention swap and checkpointing of layers, or where this pass has decided otherwise with other options.
        """
        self._check_passes(plan)
        before = {key: d for key, d in plan.decisions.items() if d.by != self.name}
        base = replace(plan, decisions=before, prefetch_chain=())
        found = find_groups(base, self.modules)
        if not found.keys:
            asked = [name for name in self.modules if name in found.missing]
            parts = parts_of_layers(plan.graph)
            raise NothingOfThatKindError("activation_offload", plan.graph.model.class_name, asked, found.has, parts)
        for key in found.keys:
            self._check(base, key)
        swaps = {key: self._decision(Action.SWAP, why) for key, why in found.keys.items() if key not in before}
        wanted = swaps | self._stay(replace(base, offload=self.settings).decide(swaps), swaps)
        earlier = {key: d for key, d in plan.decisions.items() if d.by == self.name}
        if earlier and (earlier != wanted or plan.offload != self.settings):
            raise IncompatibleError(
                f"{self.name} was run before with other options, and decided otherwise; give it once"
            )
        if found.missing:
            plan = plan.note(f"activation_offload: no layer of the model saves anything in {', '.join(found.missing)}")
        return replace(plan, offload=self.settings).decide(wanted)

    def _stay(self, plan: Plan, swaps: Mapping[RegionKey, Decision]) -> dict[RegionKey, Decision]:
        """Return the decisions of groups that the rules keep, of what would move if all of them did."""
        fates = [fate for key, fate in Fates(plan, Seen(plan)).groups.items() if key in swaps]
        groups = [Group(fate.key.fqn, fate.key.region, fate.moved_bytes) for fate in fates]
        kept = kept_groups(groups, self.settings)
        return {fates[n].key: self._decision(Action.KEEP, why) for n, why in kept.items()}

    def _decision(self, action: Action, why: str) -> Decision:
        return Decision(action=action, by=self.name, why=why, policy=OFFLOAD)

    def _check_passes(self, plan: Plan) -> None:
        """Raise an IncompatibleError where attention swap or checkpointing of layers has decided before."""
        passes = {decision.by for decision in plan.decisions.values()}
        if AttentionSwap.name in passes:
            raise IncompatibleError(OFFLOAD_AND_SWAP)
        if ActivationCheckpoint.name in passes:
            raise IncompatibleError(OFFLOAD_AND_CHECKPOINT)

    def _check(self, plan: Plan, key: RegionKey) -> None:
        """Raise an IncompatibleError where a module, one around it or one inside it is swapped or checkpointed."""
        for other in plan.related_keys(key.fqn):
            decision = plan.decisions[other]
            is_part = other.fqn.startswith(f"{key.fqn}.") and decision.action is Action.RECOMPUTE
            if not is_part and decision.policy != OFFLOAD:
                raise IncompatibleError(
                    f"{self.name} of {str(key)!r} is incompatible with {decision.action} of {str(other)!r} by "
                    f"{decision.by!r}; drop one of the two"
                )
