"""What a plan means in bytes; the report prints it, the runtime's counters are held against it."""

from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import replace

from memopt.ir.accounts import PASSES, PlanAccount, TargetAccount, TensorLine, storage_bytes, with_offload
from memopt.ir.graph import Kind, ModuleGraph, SavedTensor
from memopt.ir.offload_account import OffloadSums
from memopt.ir.plan import RECIPE, Action, Decision, Plan, RegionKey
from memopt.ir.policy import POLICIES, Keep
from memopt.ir.recompute_account import RUNS_AGAIN, Regions


def keep_reason(tensor: SavedTensor, policy: str) -> Keep | None:
    """Return why a saved tensor stays on the device, or None if the policy passes it."""
    if tensor.kind is not Kind.ACTIVATION:
        return Keep(tensor.kind.value)
    return POLICIES[policy](
        requires_grad=tensor.requires_grad,
        num_dims=len(tensor.shape),
        tensor_bytes=tensor.tensor_bytes,
        storage_bytes=tensor.storage_bytes,
    )


def account(plan: Plan) -> PlanAccount:
    """Work out what every target of a plan covers, copies, recomputes and frees."""
    whole = replace(
        plan, decisions={key: d for key, d in plan.decisions.items() if is_whole(key, d)}, prefetch_chain=()
    )
    if len(whole.decisions) == len(plan.decisions):
        return _account_of_whole(plan, Regions(plan))
    sums = OffloadSums(plan)
    regions = Regions(whole, gone=sums.gone)
    modules = _account_of_whole(whole, regions, gone=sums.gone)
    swapped = {line.tensor.index for one in modules.targets for line in one.lines if line.action is Action.SWAP}
    offload = sums.account(left=regions.inside | swapped, needed=regions.needed)
    return with_offload(modules, offload)


def is_whole(key: RegionKey, decision: Decision) -> bool:
    """Tell whether a decision is about a whole module, its output kept."""
    return not key.region and decision.route != RECIPE


def _account_of_whole(plan: Plan, regions: Regions, *, gone: Set[int] = frozenset()) -> PlanAccount:
    """Account for decisions on whole modules; `gone` are saves that leave the device otherwise."""
    lines = {key.fqn: _lines(plan, regions, key.fqn, decision) for key, decision in plan.decisions.items()}
    swapped = {line.tensor.index for target in lines.values() for line in target if line.action is Action.SWAP}
    pinned = plan.graph.held | {t.storage for t in plan.graph.saved if t.index not in swapped | gone}
    freed: set[int] = set()
    targets = [
        _target(plan, regions, key.fqn, decision, lines[key.fqn], pinned, freed)
        for key, decision in plan.decisions.items()
    ]
    return _sums(plan, regions, targets)


def _sums(plan: Plan, regions: Regions, targets: Sequence[TargetAccount]) -> PlanAccount:
    recomputed = [target.recompute for target in targets if target.recompute]
    covered = [line for target in targets for line in target.lines if line.covered]
    return PlanAccount(
        targets=tuple(targets),
        covered_bytes=storage_bytes(line.tensor for line in covered if line.action is not Action.RECOMPUTE),
        swap_bytes=sum(target.swap_bytes for target in targets),
        freed_bytes=sum(target.freed_bytes for target in targets),
        num_tensors=sum(target.num_swapped for target in targets),
        dropped_bytes=storage_bytes(line.tensor for line in covered if line.action is Action.RECOMPUTE),
        input_bytes=sum(regions.inputs.values()),
        result_bytes=sum(regions.results.values()) + sum(regions.last.values()),
        added_bytes=sum(regions.added.values()),
        replay_bytes=max((one.replay_bytes for one in recomputed), default=0),
        flops=sum(call.flops for call in plan.graph.calls if call.parent is None),
        repeated_flops=sum(one.repeated_flops for one in recomputed),
    )


def _lines(plan: Plan, regions: Regions, fqn: str, decision: Decision) -> tuple[TensorLine, ...]:
    if decision.action is Action.RECOMPUTE:
        reasons = ((tensor, regions.why_kept(tensor)) for tensor in regions.saved(fqn))
        return tuple(
            TensorLine(tensor, Action.KEEP, why) if why else TensorLine(tensor, Action.RECOMPUTE, RUNS_AGAIN)
            for tensor, why in reasons
        )
    lines = []
    for tensor in plan.graph.saved_in(fqn):
        reason = keep_reason(tensor, decision.policy)
        if reason is not None:
            lines.append(TensorLine(tensor, Action.KEEP, reason.value))
        elif decision.action is Action.SWAP:
            lines.append(TensorLine(tensor, Action.SWAP, PASSES))
        else:
            lines.append(TensorLine(tensor, Action.KEEP, Keep.MARGIN.value))
    return tuple(lines)


def _target(
    plan: Plan,
    regions: Regions,
    fqn: str,
    decision: Decision,
    lines: tuple[TensorLine, ...],
    pinned: Set[int],
    freed: set[int],
) -> TargetAccount:
    """Account for one target; `pinned` is what copying cannot free, `freed`, which grows, what is freed already."""
    covered = {line.tensor.storage: line.tensor for line in lines if line.covered}
    swapped = _copies(plan.graph, fqn, lines) if decision.action is Action.SWAP else ()
    recomputes = decision.action is Action.RECOMPUTE
    return TargetAccount(
        fqn=fqn,
        class_name=plan.graph.by_fqn[fqn].class_name,
        action=decision.action,
        why=decision.why,
        lines=lines,
        covered_bytes=storage_bytes(covered.values()),
        num_covered=len(covered),
        swap_bytes=sum(t.storage_bytes for t in swapped),
        num_swapped=len(swapped),
        freed_bytes=_free(covered.values(), regions.held, freed) if recomputes else _free(swapped, pinned, freed),
        kept=_kept(lines, covered.keys()),
        recompute=regions.account(fqn, route=decision.route, policy=decision.policy) if recomputes else None,
    )


def _free(tensors: Iterable[SavedTensor], pinned: Set[int], freed: set[int]) -> int:
    """Add to `freed` what of some tensors can be freed and is not yet, and return its bytes."""
    new = {tensor.storage: tensor for tensor in tensors if tensor.storage not in pinned and tensor.storage not in freed}
    freed.update(new)
    return storage_bytes(new.values())


def _copies(graph: ModuleGraph, fqn: str, lines: Iterable[TensorLine]) -> tuple[SavedTensor, ...]:
    """Return what is copied out: in each call of the module, calls within itself left out, each storage once."""
    passing = {line.tensor.index for line in lines if line.covered}
    copies: list[SavedTensor] = []
    end = 0
    for call in graph.calls_of(fqn):
        if call.first_save >= end:
            saved = graph.saved[call.first_save : call.end_save]
            copies += {t.storage: t for t in saved if t.index in passing}.values()
            end = call.end_save
    return tuple(copies)


def _kept(lines: Iterable[TensorLine], covered: Collection[int]) -> tuple[tuple[str, int], ...]:
    """Return (reason, bytes) of the storages that are not covered, each for the reason of its first save."""
    kept: dict[int, TensorLine] = {}
    for line in lines:
        if line.tensor.storage not in covered:
            kept.setdefault(line.tensor.storage, line)
    reasons: dict[str, int] = {}
    for line in kept.values():
        reasons[line.reason] = reasons.get(line.reason, 0) + line.tensor.storage_bytes
    return tuple(sorted(reasons.items()))
