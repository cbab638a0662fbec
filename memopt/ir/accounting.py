"""What a plan means in bytes; the report prints it, the runtime's counters are held against it."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from memopt.ir.graph import Kind, ModuleGraph, SavedTensor
from memopt.ir.plan import Action, Decision, Plan
from memopt.ir.policy import POLICIES, Keep


@dataclass(frozen=True, slots=True)
class TensorLine:
    """One saved tensor of a target, what it does and why."""

    tensor: SavedTensor
    action: Action
    reason: str

    @property
    def covered(self) -> bool:
        """Whether the policy passes it, though a margin may keep it."""
        return self.reason in _COVERED


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetAccount:
    """One decided module. Each storage counts once: covered, or kept for the reason of its first save."""

    fqn: str
    class_name: str
    action: Action
    why: str
    lines: tuple[TensorLine, ...]
    covered_bytes: int
    """What passes the policy."""
    num_covered: int
    """How many storages that is."""
    swap_bytes: int
    """What will be copied, in each call each storage once: nothing where the margin keeps the target."""
    num_swapped: int
    freed_bytes: int
    """What of it leaves the device, because nothing else holds it."""
    kept: tuple[tuple[str, int], ...]
    """(reason, bytes) of the storages that the policy does not pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAccount:
    """All targets, and the sums over them with each storage once."""

    targets: tuple[TargetAccount, ...]
    covered_bytes: int
    swap_bytes: int
    freed_bytes: int
    num_tensors: int
    """How many copies go out, and back, in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBytes:
    """Everything that autograd saves, each storage once."""

    total_bytes: int
    parameter_bytes: int
    """Of parameters and buffers: they are there anyway."""
    activation_bytes: int


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
    """Work out what every target of a plan covers, copies and frees."""
    lines = {key.fqn: _lines(plan, key.fqn, decision) for key, decision in plan.decisions.items()}
    swapped = {line.tensor.index for target in lines.values() for line in target if line.action is Action.SWAP}
    pinned = plan.graph.held | {t.storage for t in plan.graph.saved if t.index not in swapped}
    gone = set(pinned)
    targets = []
    for key, decision in plan.decisions.items():
        targets.append(_target(plan, key.fqn, decision, lines[key.fqn], gone))
    return PlanAccount(
        targets=tuple(targets),
        covered_bytes=_bytes(line.tensor for t in lines.values() for line in t if line.covered),
        swap_bytes=sum(t.swap_bytes for t in targets),
        freed_bytes=sum(t.freed_bytes for t in targets),
        num_tensors=sum(t.num_swapped for t in targets),
    )


def saved_bytes(saved: Iterable[SavedTensor]) -> SavedBytes:
    """Add up saved tensors, each storage once."""
    saved = tuple(saved)
    total = _bytes(saved)
    parameter = _bytes(t for t in saved if t.kind in (Kind.PARAMETER, Kind.BUFFER))
    return SavedBytes(total_bytes=total, parameter_bytes=parameter, activation_bytes=total - parameter)


_PASSES = "passes the policy"
_COVERED = frozenset({_PASSES, Keep.MARGIN.value})


def _lines(plan: Plan, fqn: str, decision: Decision) -> tuple[TensorLine, ...]:
    lines = []
    for tensor in plan.graph.saved_in(fqn):
        reason = keep_reason(tensor, decision.policy)
        if reason is not None:
            lines.append(TensorLine(tensor, Action.KEEP, reason.value))
        elif decision.action is Action.SWAP:
            lines.append(TensorLine(tensor, Action.SWAP, _PASSES))
        else:
            lines.append(TensorLine(tensor, Action.KEEP, Keep.MARGIN.value))
    return tuple(lines)


def _target(plan: Plan, fqn: str, decision: Decision, lines: tuple[TensorLine, ...], gone: set[int]) -> TargetAccount:
    """Account for one target; `gone` are the storages that cannot be freed (any more), and grows by this one's."""
    covered = {line.tensor.storage: line.tensor for line in lines if line.covered}
    swapped = _copies(plan.graph, fqn, lines) if decision.action is Action.SWAP else ()
    freed = {t.storage: t for t in swapped if t.storage not in gone}
    gone.update(freed)
    return TargetAccount(
        fqn=fqn,
        class_name=plan.graph.by_fqn[fqn].class_name,
        action=decision.action,
        why=decision.why,
        lines=lines,
        covered_bytes=_bytes(covered.values()),
        num_covered=len(covered),
        swap_bytes=sum(t.storage_bytes for t in swapped),
        num_swapped=len(swapped),
        freed_bytes=_bytes(freed.values()),
        kept=_kept(lines, covered.keys()),
    )


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


def _bytes(tensors: Iterable[SavedTensor]) -> int:
    return sum({t.storage: t.storage_bytes for t in tensors}.values())
