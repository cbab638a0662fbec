"""The prediction: a fake step without the plan, and one with it at each end of what copies may do."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from memopt.analyze.fake_run import DTYPES, FakeRun, fake_run
from memopt.analyze.streams import random_streams_kept
from memopt.analyze.twin import has_hooks
from memopt.errors import IllegalValueError, MemoptError, PlanMismatchError, PredictionError, RequestError
from memopt.ir import DEVICES, OPTIMIZERS, Action, DeviceProfile, Memory, Plan, StepMemory, find_device
from memopt.predict.mode import CountingMode
from memopt.predict.step import FakeSteps
from memopt.predict.surroundings import plain_surroundings
from memopt.runtime import apply_plan
from memopt.runtime.region import region_of

_HOOKS = (
    "the model has forward hooks, and a prediction calls none: what they add (as enable_input_require_grads() does, "
    "with which activations are saved that need no gradient otherwise) comes on top"
)
_SHARDS = (
    "the model is sharded over several devices, and predicted as if all of it were on each: its parameters, gradients and "
    "optimizer state take less"
)
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
    accumulate_gradients: bool = False,
    device: DeviceProfile | str = "h200",
    device_memory_bytes: int | None = None,
) -> Memory:
    """Foretell the memory of a training step with a plan and without it, as the allocator hands it out.

    `model` and `inputs` are what the plan's graph was traced from, `dtype` too where a config has weights of several.
    `grad_in_backward`: each parameter is updated as soon as its gradient is there, which is then dropped.
    `accumulate_gradients`: those of earlier batches are there from the start. `device`, a profile or the name of one,
    tells how fast it computes and copies, and what CUDA's libraries take. The live model is not run and does not change.

    Raises IllegalValueError, RequestError, and PredictionError for a model that fake tensors cannot train.
    """
    profile = _checked(plan, model, optimizer, device, device_memory_bytes)
    if grad_in_backward and accumulate_gradients:
        raise RequestError("gradients that are dropped in backward do not accumulate; give one of the two")
    with plain_surroundings(), _prediction_errors(plan):
        run = _run(plan, model, inputs, dtype)
        steps = FakeSteps(
            run, optimizer=optimizer, grad_in_backward=grad_in_backward, accumulate_gradients=accumulate_gradients
        )
        used = profile if run.target_device == "cuda" else profile.without_libraries()
        try:
            baseline = steps.step()[0].step(used)
            planned, copied, host_pinned_bytes = _planned(plan, run, steps, used)
        finally:
            steps.close()
    return Memory(
        baseline=baseline,
        planned=planned,
        optimizer=optimizer,
        grad_in_backward=grad_in_backward,
        accumulate_gradients=accumulate_gradients,
        copied_out_bytes=copied[0],
        copied_in_bytes=copied[1],
        host_pinned_bytes=host_pinned_bytes,
        device=profile,
        device_memory_bytes=device_memory_bytes,
        notes=tuple(_notes(model)) if isinstance(model, nn.Module) else (),
    )


def _notes(model: nn.Module) -> Iterator[str]:
    """Yield what a prediction of a live model does not know."""
    if has_hooks(model):
        yield _HOOKS
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        yield _SHARDS


def _checked(plan: Any, model: Any, optimizer: str, device: Any, device_memory_bytes: Any) -> DeviceProfile:
    """Return the device's profile; raises MemoptError for what cannot be predicted."""
    if not isinstance(plan, Plan):
        raise IllegalValueError("plan", type(plan).__name__, "a Plan, as memopt.plan(graph, config) returns it")
    if optimizer not in OPTIMIZERS:
        raise IllegalValueError("optimizer", optimizer, ", ".join(OPTIMIZERS))
    is_size = isinstance(device_memory_bytes, int) and device_memory_bytes > 0
    if device_memory_bytes is not None and not is_size:
        raise IllegalValueError("device_memory_bytes", device_memory_bytes, "a whole number of bytes from 1, or None")
    if isinstance(model, nn.Module) and any(map(region_of, model.modules())):
        raise RequestError(
            f"{type(model).__name__} is rewritten already, and would be predicted so also without the plan; call "
            "memopt.undo(model) before, and apply the plan again afterwards"
        )
    if isinstance(model, nn.Module) and len(places := sorted({str(p.device) for p in model.parameters()})) > 1:
        raise RequestError(
            f"{type(model).__name__} lies on {' and '.join(places)}; the memory of one device is predicted"
        )
    if not isinstance(device, DeviceProfile | str):
        raise IllegalValueError("device", type(device).__name__, f"a DeviceProfile, or one of {', '.join(DEVICES)}")
    return find_device(device) if isinstance(device, str) else device


def _run(plan: Plan, model: Any, inputs: Any, dtype: str | None) -> FakeRun:
    given, planned = plan.graph.input, plan.graph.model
    run = fake_run(
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
    class_name, num_parameters = type(run.twin).__name__, sum(p.numel() for p in run.twin.parameters())
    if (class_name, num_parameters) != (planned.class_name, planned.num_parameters):
        raise PlanMismatchError(
            f"plan for another model: it was made for {planned.name}, a {planned.class_name} of "
            f"{planned.num_parameters:,} parameters; here is a {class_name} of {num_parameters:,}"
        )
    return run


def _planned(
    plan: Plan, run: FakeRun, steps: FakeSteps, profile: DeviceProfile
) -> tuple[tuple[StepMemory, ...], tuple[int, int], int]:
    """Return the steps with the plan, what one copies out and in, and the host memory it is copied to."""
    if not plan.decisions:
        return (), (0, 0), 0
    handle = apply_plan(run.twin, plan)
    timeline, _ = steps.step(ends_at_once=True, num_forwards=NUM_FORWARDS * _replays(plan))
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
