"""A model's fake twin and the arguments of its forward, with all that makes a run of it like a real one."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memopt.analyze.fake import TargetKernels, TraceMode, like_a_real_run, silent_torch
from memopt.analyze.inputs import as_call, example_inputs, fake_arguments
from memopt.analyze.twin import twin_of_config, twin_of_model
from memopt.analyze.values import InputValues
from memopt.errors import IllegalValueError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AUTOCASTS = ("none", "bfloat16", "float16")
TARGET_DEVICES = ("cuda", "cpu")


@dataclass(frozen=True, kw_only=True)
class FakeRun:
    """What is run, and on which fake tensors."""

    twin: nn.Module
    mode: TraceMode
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    values: InputValues
    target_device: str
    autocast: str

    @contextmanager
    def on_fakes(self) -> Iterator[None]:
        """Let tensors be fake, and answer as the target device's kernels do."""
        with ExitStack() as stack:
            for context in (
                silent_torch(),
                like_a_real_run(),
                self.mode,
                self.values,
                TargetKernels(self.target_device),
            ):
                stack.enter_context(context)
            yield

    def autocasting(self) -> Any:
        """Return the context of the forward."""
        dtype = DTYPES.get(self.autocast)
        return torch.autocast(device_type(self.twin), dtype=dtype) if dtype else nullcontext()


def fake_run(
    model: Any,
    inputs: Any,
    mode: TraceMode,
    *,
    batch_size: int,
    seq_length: int,
    dtype: str,
    autocast: str,
    attn_implementation: str,
    target_device: str | None,
) -> FakeRun:
    """Return the fake twin of a live model or of a config, with its inputs; raises MemoptError."""
    check("dtype", dtype, DTYPES)
    check("autocast", autocast, AUTOCASTS)
    live = model if isinstance(model, nn.Module) else None
    if live is not None:
        target_device = target_device or device_type(live)
        twin = twin_of_model(live, mode)
    else:
        target_device = target_device or "cuda"
        twin = twin_of_config(model, mode, dtype=DTYPES[dtype], attn_implementation=attn_implementation)
    check("target_device", target_device, TARGET_DEVICES)
    if inputs is None:
        with mode:
            inputs = example_inputs(twin, batch_size=batch_size, seq_length=seq_length)
    values = InputValues(mode)
    if live is not None:
        values.know_tables(live, twin)
    args, kwargs = fake_arguments(as_call(inputs), values, mode)
    return FakeRun(
        twin=twin, mode=mode, args=args, kwargs=kwargs, values=values, target_device=target_device, autocast=autocast
    )


def device_type(model: nn.Module) -> str:
    """Return the kind of device that a model lies on."""
    return next((p.device.type for p in model.parameters()), "cpu")


def check(key: str, value: str, legal: Any) -> None:
    """Raise IllegalValueError unless a value is legal."""
    if value not in legal:
        raise IllegalValueError(key, value, ", ".join(legal))
