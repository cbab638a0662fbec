"""Trace a model into a ModuleGraph: one training forward of a fake twin, observed."""

import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from memopt.analyze.fake import TargetKernels, TraceMode, like_a_real_run, silent_torch
from memopt.analyze.inputs import as_call, batch_shape, example_inputs, fake_arguments
from memopt.analyze.observation import Observation
from memopt.analyze.observe import observe
from memopt.analyze.roles import name_saves
from memopt.analyze.streams import random_streams_kept
from memopt.analyze.twin import has_hooks, twin_of_config, twin_of_model
from memopt.analyze.values import InputValues
from memopt.errors import IllegalValueError, MemoptError, TraceError
from memopt.ir import ModuleGraph, TraceInput
from memopt.units import count_noun

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TARGET_DEVICES = ("cuda", "cpu")


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
    _check("dtype", dtype, DTYPES)
    _check("autocast", autocast, ("none", "bfloat16", "float16"))
    mode = TraceMode()
    if isinstance(model, nn.Module):
        target_device = target_device or _device_type(model)
        twin = twin_of_model(model, mode)
    else:
        target_device = target_device or "cuda"
        twin = twin_of_config(model, mode, dtype=DTYPES[dtype], attn_implementation=attn_implementation)
    _check("target_device", target_device, TARGET_DEVICES)
    if inputs is None:
        with mode:
            inputs = example_inputs(twin, batch_size=batch_size, seq_length=seq_length)
    args, kwargs = as_call(inputs)
    live = model if isinstance(model, nn.Module) else None
    with silent_torch():
        seen = _observe_fake(twin, mode, args, kwargs, target_device=target_device, autocast=autocast, live=live)
    trace_input = _trace_input(twin, args, kwargs, autocast=autocast, target_device=target_device)
    notes = _notes(twin, seen, autocast=autocast, target_device=target_device)
    return build_graph(twin, seen, name=name or _name(model), trace_input=trace_input, notes=notes)


def _observe_fake(
    twin: nn.Module,
    mode: TraceMode,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    target_device: str,
    autocast: str,
    live: nn.Module | None,
) -> Observation:
    values = InputValues(mode)
    if live is not None:
        values.know_tables(live, twin)
    fake_args, fake_kwargs = fake_arguments((tuple(args), dict(kwargs)), values, mode)
    device = _device_type(twin)
    seen = Observation(flops=lambda: mode.flops)
    with ExitStack() as stack:
        stack.enter_context(_trace_errors(twin, seen, hooked=live is not None and has_hooks(live)))
        stack.enter_context(like_a_real_run())
        stack.enter_context(mode)
        stack.enter_context(values)
        stack.enter_context(TargetKernels(target_device))
        if autocast != "none":
            stack.enter_context(torch.autocast(device, dtype=DTYPES[autocast]))
        observe(twin, fake_args, fake_kwargs, seen=seen)
        name_saves(seen)
    seen.asked_for_choices = values.asked_for_choices
    return seen


@contextmanager
def _trace_errors(twin: nn.Module, seen: Observation, *, hooked: bool) -> Iterator[None]:
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


def _trace_input(
    twin: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, autocast: str, target_device: str
) -> TraceInput:
    batch_size, seq_length = batch_shape(args, kwargs)
    config = getattr(twin, "config", None)
    dtypes = {p.dtype for p in twin.parameters()}
    return TraceInput(
        batch_size=batch_size,
        seq_length=seq_length,
        dtype=dtype_name(dtypes.pop()) if len(dtypes) == 1 else "mixed" if dtypes else "none",
        autocast=autocast,
        attn_implementation=getattr(config, "_attn_implementation", None) or "none",
        target_device=target_device,
    )


def _notes(twin: nn.Module, seen: Observation, *, autocast: str, target_device: str) -> tuple[str, ...]:
    notes = []
    if autocast != "none" and target_device != _device_type(twin):
        notes.append(f"autocast was traced with the CPU's list of ops; on {target_device} a few more run in float32")
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


def _device_type(model: nn.Module) -> str:
    return next((p.device.type for p in model.parameters()), "cpu")


def _name(model: Any) -> str:
    config = model.config if isinstance(model, nn.Module) and hasattr(model, "config") else model
    return getattr(config, "name_or_path", "") or type(model).__name__


def _check(key: str, value: str, legal: Any) -> None:
    if value not in legal:
        raise IllegalValueError(key, value, ", ".join(legal))
