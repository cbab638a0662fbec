"""The sums that stand for a plan: of one target, of all targets, of everything that is saved."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from memopt.ir.graph import Kind, SavedTensor
from memopt.ir.offload_accounts import OffloadAccount
from memopt.ir.plan import Action
from memopt.ir.policy import Keep
from memopt.ir.recompute_account import RUNS_AGAIN, RecomputeAccount

PASSES = "passes the policy"
_COVERED = frozenset({PASSES, Keep.MARGIN.value, RUNS_AGAIN})


@dataclass(frozen=True, slots=True)
class TensorLine:
    """One saved tensor of a target, what it does and why."""

    tensor: SavedTensor
    action: Action
    reason: str

    @property
    def covered(self) -> bool:
        """Whether the policy passes it, though a margin may keep it, or backward makes it again."""
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
    """What passes the policy; of a recomputed module, what backward makes again."""
    num_covered: int
    """How many storages that is."""
    swap_bytes: int
    """What will be copied, in each call each storage once: nothing where the margin keeps the target."""
    num_swapped: int
    freed_bytes: int
    """What of it leaves the device, because nothing else holds it."""
    kept: tuple[tuple[str, int], ...]
    """(reason, bytes) of the storages that are not covered."""
    recompute: RecomputeAccount | None = None
    """Of a module that is recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAccount:
    """All targets, and the sums over them with each storage once."""

    targets: tuple[TargetAccount, ...]
    """The modules that are decided on as a whole."""
    covered_bytes: int
    """What passes the policies of swap; of regions, what moves."""
    swap_bytes: int
    freed_bytes: int
    """By swapping and by recomputing: what is saved without the plan and leaves the device with it."""
    num_tensors: int
    """How many copies go out, and back, in one step."""
    dropped_bytes: int
    """What backward makes again, also where something else holds it."""
    input_bytes: int
    """Of the inputs of all recomputed modules."""
    result_bytes: int
    """Of the results that they keep, and of the last saves that stay."""
    added_bytes: int
    """Of these inputs and results, what is not on the device without the plan."""
    replay_bytes: int
    """What backward makes again at once, in the call of a recomputed module that drops most."""
    flops: int
    """Of the whole forward."""
    repeated_flops: int
    """Of those that backward runs a second time."""
    offload: OffloadAccount | None = None
    """Of a plan that offloads regions, or recomputes parts whose output is not kept; the sums above hold it too."""

    @property
    def net_freed_bytes(self) -> int:
        """How much less the device holds between forward and backward; negative where the plan costs memory."""
        return self.freed_bytes - self.added_bytes


def with_offload(account: PlanAccount, offload: OffloadAccount) -> PlanAccount:
    """Return the account of whole modules with that of regions and parts beside them."""
    return replace(
        account,
        covered_bytes=account.covered_bytes + offload.moved_bytes,
        swap_bytes=account.swap_bytes + offload.moved_bytes,
        freed_bytes=offload.freed_bytes,
        num_tensors=account.num_tensors + offload.num_tensors,
        dropped_bytes=account.dropped_bytes + offload.dropped_bytes + offload.output_bytes,
        input_bytes=account.input_bytes + offload.input_bytes,
        added_bytes=offload.added_bytes,
        replay_bytes=max(account.replay_bytes, offload.replay_bytes),
        repeated_flops=account.repeated_flops + offload.repeated_flops,
        offload=offload,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBytes:
    """Everything that autograd saves, each storage once."""

    total_bytes: int
    parameter_bytes: int
    """Of parameters and buffers: they are there anyway."""
    activation_bytes: int


def saved_bytes(saved: Iterable[SavedTensor]) -> SavedBytes:
    """Add up saved tensors, each storage once."""
    saved = tuple(saved)
    total = storage_bytes(saved)
    parameter = storage_bytes(t for t in saved if t.kind in (Kind.PARAMETER, Kind.BUFFER))
    return SavedBytes(total_bytes=total, parameter_bytes=parameter, activation_bytes=total - parameter)


def storage_bytes(tensors: Iterable[SavedTensor]) -> int:
    """Return the bytes of the storages of some tensors, each storage once."""
    return sum({t.storage: t.storage_bytes for t in tensors}.values())
