"""Trace a model into a ModuleGraph: one training forward of a fake twin, observed."""

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)

from memopt.analyze.build import build_graph, dtype_name
from memopt.analyze.fake import TraceMode
from memopt.analyze.fake_run import FakeRun, device_type, fake_run
from memopt.analyze.inputs import batch_shape
from memopt.analyze.observation import Observation
from memopt.analyze.observe import observe
from memopt.analyze.roles import name_saves
from memopt.analyze.streams import random_streams_kept
from memopt.analyze.twin import has_hooks
from memopt.errors import MemoptError, TraceError
from memopt.ir import ModuleGraph, TraceInput
from memopt.units import count_noun


@random_streams_kept()
def analyze(
    model: Any,
    inputs: Any = None,
    *,
    batch_size: int = 1,
    seq_length: int = 1024,
    dtype: str = "bfloat16",
    autocast: str = "none",
    attn_implementation: str = "sdpa",
    target_device: str | None = None,
    name: str | None = None,
) -> ModuleGraph:
    """Measure what autograd saves in one training forward of a live model or of a config without weights.

    `inputs` are what forward takes: a mapping, or a tensor or tuple by position; without them a batch of token ids
    (batch_size, seq_length) is made. `dtype` and `attn_implementation` are for a config: a live model has its own.
    The live model is not run and does not change. `target_device` is where it will train: ``cuda`` needs no GPU, and
    is the default for a config; a live model's is where it is.

    Raises IllegalValueError, and TraceError for a model that fake tensors cannot run.
    """
    run = fake_run(
        model,
        inputs,
        TraceMode(),
        batch_size=batch_size,
        seq_length=seq_length,
        dtype=dtype,
        autocast=autocast,
        attn_implementation=attn_implementation,
        target_device=target_device,
    )
    seen = _observe_fake(run, hooked=isinstance(model, nn.Module) and has_hooks(model))
    return build_graph(
        run.twin, seen, name=name or _name(model), trace_input=_trace_input(run), notes=_notes(run, seen)
    )


def _observe_fake(run: FakeRun, *, hooked: bool) -> Observation:
    seen = Observation(flops=lambda: run.mode.flops)
    with trace_errors(run.twin, seen, hooked=hooked), run.on_fakes(), run.autocasting():
        observe(run.twin, run.args, run.kwargs, seen=seen)
        name_saves(seen)
    seen.asked_for_choices = run.values.asked_for_choices
    return seen


@contextmanager
def trace_errors(twin: nn.Module, seen: Observation, *, hooked: bool) -> Iterator[None]:
    """Turn what fake tensors cannot do into an error that names the module and the way out."""
    try:
        yield
    except TorchDynamoException as error:
        raise TraceError(
            f"{type(twin).__name__} cannot be traced: {_where(seen)} calls torch.compile, which fake tensors "
            "cannot enter; choose an implementation that runs eagerly, e.g. attn_implementation='sdpa'"
        ) from error
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException) as error:
        raise TraceError(
            f"{type(twin).__name__} cannot be traced without data: {_where(seen)} asks for the values of a tensor "
            f"({error}) in {_line_of(error)}; analyze it with inputs that leave that out (a loss: without labels, which "
            "changes no layer), or set a switch of its config, where one avoids it"
        ) from error
    except MemoptError:
        raise
    except Exception as error:
        raise TraceError(
            f"{type(twin).__name__} cannot be traced: {_where(seen)} raises {type(error).__name__}: "
            f"{_first_line(error)}; if it runs on real tensors with these inputs, it does what fake tensors cannot"
            f"{', or what a hook should do: a trace calls none' if hooked else ''}"
        ) from error


def _where(seen: Observation) -> str:
    """Return which module's forward was running."""
    fqn = seen.active[-1].fqn if seen.active else ""
    return repr(fqn) if fqn else "its forward"


def _line_of(error: Exception) -> str:
    """Return file and line of the model's own code that asked, which is neither torch's nor ours."""
    ours = tuple(f"{path}{os.sep}" for path in (Path(torch.__file__).parent, Path(__file__).parents[1]))
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if not frame.filename.startswith(ours)), frames[-1])
    return f"{Path(frame.filename).name}:{frame.lineno}"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _trace_input(run: FakeRun) -> TraceInput:
    batch_size, seq_length = batch_shape(run.args, run.kwargs)
    config = getattr(run.twin, "config", None)
    dtypes = {p.dtype for p in run.twin.parameters()}
    return TraceInput(
        batch_size=batch_size,
        seq_length=seq_length,
        dtype=dtype_name(dtypes.pop()) if len(dtypes) == 1 else "mixed" if dtypes else "none",
        autocast=run.autocast,
        attn_implementation=getattr(config, "_attn_implementation", None) or "none",
        target_device=run.target_device,
    )


def _notes(run: FakeRun, seen: Observation) -> tuple[str, ...]:
    notes = []
    if run.autocast != "none" and run.target_device != device_type(run.twin):
        notes.append(
            f"autocast was traced with the CPU's list of ops; on {run.target_device} a few more run in float32"
        )
    if seen.num_without_storage:
        saves = count_noun(seen.num_without_storage, "saved tensor")
        notes.append(
            f"{saves} without a storage of their own (sparse) are not in this trace, nor their bytes in its sums"
        )
    if seen.asked_for_choices:
        notes.append(
            "what is computed of which tokens depends on data (a loop over experts): the trace took routers to choose "
            "evenly, so that a real step differs in these sizes"
        )
    return tuple(notes)


def _name(model: Any) -> str:
    config = model.config if isinstance(model, nn.Module) and hasattr(model, "config") else model
    return getattr(config, "name_or_path", "") or type(model).__name__
