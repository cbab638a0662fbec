"""Train with and without a plan, and say whether the plan changed anything but memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

import memopt
from memopt.cli.models import positions_of
from memopt.cli.training import Run, snapshot, train
from memopt.cli.verify import Copies, Difference, compare, copy_faults, nearest, replay_faults, training_faults
from memopt.ir import Plan, PlanAccount, TraceInput, account
from memopt.report import offloads_nothing

if TYPE_CHECKING:
    from memopt.runtime import Stats


_NOTHING = "the plan swaps and recomputes nothing"


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What memopt-apply found out; `values` are its JSON."""

    values: dict[str, Any]
    differences: tuple[str, ...]
    """How the planned run trained differently; empty if it did not, or if nobody asked."""
    contradictions: tuple[str, ...]
    """Where the counters contradict the plan, or that it does nothing."""
    predicted: bool
    """Whether the plan's bytes were held against the counters."""

    @property
    def faults(self) -> tuple[str, ...]:
        """Why it is not verified."""
        return self.differences + self.contradictions


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is trained, and how."""

    model: nn.Module
    plan: Plan
    batches: Sequence[Mapping[str, Any]]
    input: TraceInput
    """What the batches are, as a trace says it."""
    seed: int
    say: Callable[[str], None]

    @property
    def same_input(self) -> bool:
        """Whether the plan was made for these batches, so that its bytes must hold."""
        return self.plan.graph.input == self.input

    def run(self, start: Mapping[str, Any], name: str) -> Run:
        """Train once from the given weights."""
        say = self.say
        with positions_of(getattr(self.model, "config", None), self.input.seq_length):
            return train(
                self.model,
                start,
                self.batches,
                autocast=self.input.autocast,
                seed=self.seed,
                say=lambda doing: say(f"Training {name}: {doing}"),
            )


def prove(trial: Trial, *, verify: bool) -> Proof:
    """Train without the plan (on an accelerator twice), then with it, and compare. The model is undone afterwards."""
    start = snapshot(trial.model)
    on_cpu = next(trial.model.parameters()).device.type == "cpu"
    baselines = [trial.run(start, "without the plan") for _ in range(verify + (verify and not on_cpu))]
    planned, stats = _run_with_plan(trial, start)
    totals = account(trial.plan)
    difference, differences = judge(baselines, planned)
    contradictions = _contradictions(trial, totals, stats) if verify else []
    faults = [*differences, *contradictions]
    values = {
        "verified": not faults if verify else None,
        **_equality(difference),
        **_counters(stats),
        "predicted_swap_bytes": totals.swap_bytes,
        **_replays(totals, stats),
        **_costs(baselines[0] if baselines else None, planned),
        "notes": [*faults, *_notes(trial, totals, baselines, planned)],
    }
    return Proof(
        values=values,
        differences=tuple(differences),
        contradictions=tuple(contradictions),
        predicted=trial.same_input,
    )


def judge(baselines: Sequence[Run], planned: Run) -> tuple[Difference | None, list[str]]:
    """Return how the planned run differs from the nearest run without the plan, and what is wrong with that."""
    if not baselines:
        return None, []
    difference = nearest(*(compare(baseline, planned) for baseline in (baselines[0], baselines[-1])))
    noise = compare(*baselines) if len(baselines) > 1 else None
    return difference, training_faults(difference, noise)


def input_differences(planned: TraceInput, here: TraceInput) -> list[str]:
    """Return in which fields two inputs differ: ``seq_length: 1024, here 512``."""
    real = asdict(here)
    return [f"{key}: {value}, here {real[key]}" for key, value in asdict(planned).items() if value != real[key]]


def _run_with_plan(trial: Trial, start: Mapping[str, Any]) -> "tuple[Run, Stats]":
    handle = memopt.apply(trial.model, trial.plan)
    try:
        return trial.run(start, "with the plan"), handle.stats()
    finally:
        handle.undo()


def _contradictions(trial: Trial, totals: PlanAccount, stats: "Stats") -> list[str]:
    """Return why equal results do not prove the plan."""
    if _does_nothing(totals):
        return [f"{offloads_nothing(totals) or _NOTHING}, so that equal results prove nothing"]
    return [
        *copy_faults(totals, _copies(trial, totals, stats)),
        *replay_faults(totals, stats.replayed_calls),
    ]


def _does_nothing(totals: PlanAccount) -> bool:
    recipes = totals.offload.recipes if totals.offload else ()
    return not totals.swap_bytes and not recipes and not any(target.recompute for target in totals.targets)


def _copies(trial: Trial, totals: PlanAccount, stats: "Stats") -> Copies:
    return Copies(
        copied_out_bytes=stats.copied_out_bytes,
        copied_in_bytes=stats.copied_in_bytes,
        predicted_bytes=totals.swap_bytes * len(trial.batches) if trial.same_input else None,
    )


def _equality(difference: Difference | None) -> dict[str, Any]:
    return {
        "losses_equal": difference and difference.losses_equal,
        "gradients_equal": difference and difference.gradients_equal,
        "max_gradient_difference": difference and _finite(difference.max_gradient),
    }


def _counters(stats: "Stats") -> dict[str, Any]:
    return {
        "registered": {"tensors": stats.registered_tensors, "bytes": stats.registered_bytes},
        "copied_out": {"tensors": stats.copied_out_tensors, "bytes": stats.copied_out_bytes},
        "copied_in": {"tensors": stats.copied_in_tensors, "bytes": stats.copied_in_bytes},
    }


def _replays(totals: PlanAccount, stats: "Stats") -> dict[str, Any]:
    """Return the counters of what was recomputed beside what the plan foretells for a step; nothing for other plans."""
    recomputed = [target.recompute for target in totals.targets if target.recompute]
    recipes = totals.offload.recipes if totals.offload else ()
    counters = {
        "checkpointed_calls": stats.checkpointed_calls,
        "replayed_calls": stats.replayed_calls,
        "kept_results_bytes": stats.kept_results_bytes,
        "predicted_calls": sum(one.num_calls for one in recomputed) + sum(one.num_calls for one in recipes),
        "predicted_kept_results_bytes": totals.result_bytes,
    }
    return {"replays": counters} if recomputed or recipes else {}


def _costs(baseline: Run | None, planned: Run) -> dict[str, Any]:
    return {
        key: {"baseline": baseline and getattr(baseline, key), "planned": getattr(planned, key)}
        for key in ("step_seconds", "peak_device_bytes")
    }


def _notes(trial: Trial, totals: PlanAccount, baselines: Sequence[Run], planned: Run) -> list[str]:
    notes = []
    if baselines and planned.any_nan and baselines[0].any_nan:
        notes.append("the loss is NaN in both runs")
    if not baselines and _does_nothing(totals):
        notes.append(offloads_nothing(totals) or _NOTHING)
    if not _does_nothing(totals) and (why := offloads_nothing(totals)):
        notes.append(why)
    if differing := input_differences(trial.plan.graph.input, trial.input):
        notes.append(
            f"the plan was made for another input ({'; '.join(differing)}): "
            "its predicted bytes were not held against the counters"
        )
    if planned.peak_device_bytes is None:
        notes.append("on a CPU there is no device memory to save: peak_device_bytes is empty, step times are no guide")
    if len(baselines) > 1 and not compare(*baselines).equal:
        notes.append("the run without the plan differs from itself: its kernels are not deterministic")
    return notes


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
