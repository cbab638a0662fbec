"""Train with and without a plan, and say whether the plan changed anything but memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

import memopt
from memopt.cli.training import Run, snapshot, train
from memopt.cli.verify import Copies, Difference, compare, copy_faults, nearest, training_faults
from memopt.ir import Plan, account


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What memopt-apply found out; `values` are its JSON."""

    values: dict[str, Any]
    faults: tuple[str, ...]
    """Why it is not verified; empty if it is, or if nobody asked."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is trained, and how."""

    model: nn.Module
    plan: Plan
    batches: Sequence[Mapping[str, Any]]
    autocast: str
    seed: int
    same_input: bool
    """Whether the plan was made for these batches, so that its bytes must hold."""
    say: Callable[[str], None]

    def run(self, start: Mapping[str, Any], name: str) -> Run:
        """Train once from the given weights."""
        say = self.say
        return train(
            self.model,
            start,
            self.batches,
            autocast=self.autocast,
            seed=self.seed,
            say=lambda doing: say(f"Training {name}: {doing}"),
        )


def prove(trial: Trial, *, verify: bool) -> Proof:
    """Train without the plan (on an accelerator twice), then with it, and compare. The model is undone afterwards."""
    start = snapshot(trial.model)
    on_cpu = next(trial.model.parameters()).device.type == "cpu"
    baselines = [trial.run(start, "without the plan") for _ in range(verify + (verify and not on_cpu))]
    handle = memopt.apply(trial.model, trial.plan)
    try:
        planned = trial.run(start, "with the plan")
        stats = handle.stats()
    finally:
        handle.undo()
    difference, faults = judge(baselines, planned)
    totals = account(trial.plan)
    if verify:
        predicted = totals.swap_bytes * len(trial.batches) if trial.same_input else None
        copies = Copies(
            copied_out_bytes=stats.copied_out_bytes, copied_in_bytes=stats.copied_in_bytes, predicted_bytes=predicted
        )
        faults += copy_faults(totals, copies)
    baseline = baselines[0] if baselines else None
    values = {
        "verified": not faults if verify else None,
        "losses_equal": difference and difference.losses_equal,
        "gradients_equal": difference and difference.gradients_equal,
        "max_gradient_difference": difference and _finite(difference.max_gradient),
        "registered": {"tensors": stats.registered_tensors, "bytes": stats.registered_bytes},
        "copied_out": {"tensors": stats.copied_out_tensors, "bytes": stats.copied_out_bytes},
        "copied_in": {"tensors": stats.copied_in_tensors, "bytes": stats.copied_in_bytes},
        "predicted_swap_bytes": totals.swap_bytes,
        "step_seconds": {"baseline": baseline and baseline.step_seconds, "planned": planned.step_seconds},
        "peak_device_bytes": {
            "baseline": baseline and baseline.peak_device_bytes,
            "planned": planned.peak_device_bytes,
        },
        "notes": [*faults, *_notes(trial, baselines, on_cpu=on_cpu)],
    }
    return Proof(values=values, faults=tuple(faults))


def judge(baselines: Sequence[Run], planned: Run) -> tuple[Difference | None, list[str]]:
    """Return how the planned run differs from the nearest run without the plan, and what is wrong with that."""
    if not baselines:
        return None, []
    difference = nearest(*(compare(baseline, planned) for baseline in (baselines[0], baselines[-1])))
    noise = compare(*baselines) if len(baselines) > 1 else None
    return difference, training_faults(difference, noise)


def _notes(trial: Trial, baselines: Sequence[Run], *, on_cpu: bool) -> list[str]:
    notes = []
    if not account(trial.plan).swap_bytes:
        notes.append("the plan swaps nothing, so that equal results prove nothing")
    if not trial.same_input:
        notes.append("the plan was made for another input: its predicted bytes were not held against the counters")
    if on_cpu:
        notes.append("on a CPU there is no device memory to save: peak_device_bytes is empty, step times are no guide")
    if len(baselines) > 1 and not _equal(compare(*baselines)):
        notes.append("the run without the plan differs from itself: its kernels are not deterministic")
    return notes


def _equal(difference: Difference) -> bool:
    return difference.losses_equal and difference.gradients_equal


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
