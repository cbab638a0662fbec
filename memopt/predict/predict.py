"""The prediction: a fake step without the plan, and one with it at each end of what copies may do."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memopt.analyze.fake_run import DTYPES, FakeRun, fake_run
from memopt.analyze.streams import random_streams_kept
from memopt.errors import IllegalValueError, MemoptError, PredictionError
from memopt.ir import DEVICES, OPTIMIZERS, Action, DeviceProfile, Memory, Plan, StepMemory
from memopt.predict.mode import CountingMode
from memopt.predict.step import FakeSteps
from memopt.runtime import apply_plan

NUM_FORWARDS = 2
"""After so many a region that is replayed does what it does in every further step."""


@random_streams_kept()
def predict(
    plan: Plan,
    model: Any,
    inputs: Any = None,
    *,
    optimizer: str = "adamw-fused",
    grad_in_backward: bool = False,
    dtype: str | None = None,
    device: DeviceProfile = DEVICES["h200"],
    device_memory_bytes: int | None = None,
) -> Memory:
    """Foretell the memory of a training step with a plan and without it, as the allocator hands it out.

    `model` and `inputs` are what the plan's graph was traced from, `dtype` too where a config has weights of several.
    `grad_in_backward`: each parameter is updated as soon as its gradient is there, which is then dropped. `device` tells
    how fast it computes and copies, and what CUDA's libraries take. The live model is not run and does not change.

    Raises IllegalValueError, and PredictionError for a model that fake tensors cannot train.
    """
    if optimizer not in OPTIMIZERS:
        raise IllegalValueError("optimizer", optimizer, ", ".join(OPTIMIZERS))
    with _prediction_errors(plan):
        run = _run(plan, model, inputs, dtype)
        steps = FakeSteps(run, optimizer=optimizer, grad_in_backward=grad_in_backward)
        profile = device if run.target_device == "cuda" else device.without_libraries()
        baseline = steps.step()[0].step(profile)
        planned, copied, host_pinned_bytes = _planned(plan, run, steps, profile)
    return Memory(
        baseline=baseline,
        planned=planned,
        optimizer=optimizer,
        grad_in_backward=grad_in_backward,
        copied_out_bytes=copied[0],
        copied_in_bytes=copied[1],
        host_pinned_bytes=host_pinned_bytes,
        device=device,
        device_memory_bytes=device_memory_bytes,
    )


def _run(plan: Plan, model: Any, inputs: Any, dtype: str | None) -> FakeRun:
    given = plan.graph.input
    return fake_run(
        model,
        inputs,
        CountingMode(),
        batch_size=given.batch_size,
        seq_length=given.seq_length,
        dtype=dtype or (given.dtype if given.dtype in DTYPES else "bfloat16"),
        autocast=given.autocast,
        attn_implementation=given.attn_implementation,
        target_device=given.target_device,
    )


def _planned(
    plan: Plan, run: FakeRun, steps: FakeSteps, profile: DeviceProfile
) -> tuple[tuple[StepMemory, ...], tuple[int, int], int]:
    """Return the steps with the plan, what one copies out and in, and the host memory it is copied to."""
    if not plan.decisions:
        return (), (0, 0), 0
    handle = apply_plan(run.twin, plan)
    timeline, engine = steps.step(ends_at_once=True, num_forwards=NUM_FORWARDS * _replays(plan))
    low, copied = timeline.step(profile), handle.stats()
    if not copied.copied_out_bytes:
        return (low,), (0, 0), 0
    timeline, engine = steps.step(ends_at_once=False)
    out = handle.stats().copied_out_bytes - copied.copied_out_bytes
    # What backward needs before it has left stays, and is not copied in: at the most, everything comes back.
    return (low, timeline.step(profile)), (out, copied.copied_in_bytes), engine.pool.held_bytes


def _replays(plan: Plan) -> bool:
    return any(decision.action is Action.RECOMPUTE for decision in plan.decisions.values())


@contextmanager
def _prediction_errors(plan: Plan) -> Iterator[None]:
    try:
        yield
    except MemoptError:
        raise
    except Exception as error:
        raise PredictionError(plan.graph.model.class_name, error) from error
