"""Hold a planned run against the run without the plan, and its counters against the plan."""

import math
from dataclasses import dataclass

import torch

from memopt.cli.training import Run
from memopt.ir import PlanAccount
from memopt.units import count_noun, format_bytes


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How two runs differ."""

    losses_equal: bool
    """Every loss, bit for bit."""
    gradients_equal: bool
    """Every gradient of every step, bit for bit."""
    max_loss: float
    max_gradient: float

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return self.losses_equal and self.gradients_equal


@dataclass(frozen=True, kw_only=True)
class Copies:
    """What the counters say after the planned run, and what the plan foretold for it."""

    copied_out_bytes: int
    copied_in_bytes: int
    predicted_bytes: int | None
    """Over all steps; None where the plan was made for another input."""


def compare(one: Run, other: Run) -> Difference:
    """Return how two runs differ."""
    losses = [_distance(a, b) for a, b in zip(one.losses, other.losses, strict=True)]
    steps = list(zip(one.gradients, other.gradients, strict=True))
    gradients = [_distance(a[name], b[name]) for a, b in steps for name in a.keys() & b.keys()]
    names_equal = all(a.keys() == b.keys() for a, b in steps)
    return Difference(
        losses_equal=all(equal for equal, _ in losses),
        gradients_equal=names_equal and all(equal for equal, _ in gradients),
        max_loss=max((size for _, size in losses), default=0.0),
        max_gradient=max((size for _, size in gradients), default=0.0),
    )


def training_faults(planned: Difference, noise: Difference | None) -> list[str]:
    """Return what is wrong with a planned run; `noise` is how the run without a plan differs from itself."""
    if noise is not None and not noise.equal:
        return _noisy_faults(planned, noise)
    faults = []
    if not planned.losses_equal:
        faults.append(f"losses differ from the run without the plan by up to {planned.max_loss:.3g}")
    if not planned.gradients_equal:
        faults.append(f"gradients differ from the run without the plan by up to {planned.max_gradient:.3g}")
    return faults


def copy_faults(totals: PlanAccount, copies: Copies) -> list[str]:
    """Return where the counters contradict the plan.

    A group whose backward begins before its copy has left comes back without one, and so may the last of a step:
    that nothing came back is wrong only where more than one went out.
    """
    groups = totals.offload.groups if totals.offload else ()
    num_swapping = sum(bool(target.swap_bytes) for target in totals.targets)
    num_swapping += sum(bool(group.moved_bytes) for group in groups)
    if num_swapping and not copies.copied_out_bytes:
        return ["the plan swaps tensors, and nothing was copied out"]
    if num_swapping > 1 and not copies.copied_in_bytes:
        return [f"{format_bytes(copies.copied_out_bytes)} were copied out, and nothing came back"]
    if copies.predicted_bytes is not None and copies.copied_out_bytes != copies.predicted_bytes:
        out, foretold = format_bytes(copies.copied_out_bytes), format_bytes(copies.predicted_bytes)
        return [f"{out} ({copies.copied_out_bytes} B) were copied out, the plan says {foretold}"]
    return []


def replay_faults(totals: PlanAccount, replayed_calls: int) -> list[str]:
    """Return where the counters contradict what the plan recomputes."""
    regions = sum(bool(target.recompute and target.recompute.num_calls) for target in totals.targets)
    regions += len(totals.offload.recipes) if totals.offload else 0
    if regions and not replayed_calls:
        return [f"the plan recomputes {count_noun(regions, 'region')}, and nothing was replayed"]
    return []


def nearest(one: Difference, other: Difference) -> Difference:
    """Return the smaller of two differences: to either of two runs that differ themselves."""
    return min(one, other, key=lambda difference: (difference.max_gradient, difference.max_loss))


def _noisy_faults(planned: Difference, noise: Difference) -> list[str]:
    if planned.max_loss <= noise.max_loss and planned.max_gradient <= noise.max_gradient:
        return []
    return [
        f"the planned run differs by up to {planned.max_gradient:.3g} in a gradient and {planned.max_loss:.3g} in a "
        f"loss; the run without the plan differs from itself by {noise.max_gradient:.3g} and {noise.max_loss:.3g} only"
    ]


def _distance(one: torch.Tensor, other: torch.Tensor) -> tuple[bool, float]:
    """Return whether two tensors are equal, NaN to NaN at the same place, and by how much they differ at most."""
    if one.shape != other.shape:
        return False, math.inf
    differs = (one != other) & ~(one.isnan() & other.isnan())
    if not differs.any():
        return True, 0.0
    size = float((one[differs].double() - other[differs].double()).abs().max())
    return False, math.inf if math.isnan(size) else size
