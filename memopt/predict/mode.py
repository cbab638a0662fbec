"""Fake tensors whose bytes are counted, operator by operator."""

import functools
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memopt.analyze.fake import DEVICE, TraceMode
from memopt.ir import Use
from memopt.predict.answers import Answers
from memopt.predict.live import LiveBytes
from memopt.predict.places import Places
from memopt.predict.timeline import Timeline
from memopt.runtime.prediction import draws, set_draws

_KEEPS_STORAGES = frozenset({torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset})
"""FakeTensorMode's cache would keep the storage that these are called with."""


class CountingMode(TraceMode):
    """Answer operators on fake tensors, count the storages that they make, and write down the timeline of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.live = LiveBytes()
        self._answers = Answers(self)
        self._on_host = {"meta"}
        """Devices whose tensors take no memory of the one that is predicted."""
        self.use: Use | None = Use.PARAMETERS
        """What the storages that are made now are for; None for those that are not to be counted."""
        self._timeline: Timeline | None = None
        self._places: Places | None = None

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer an operator and count what it makes; what it is made of itself is not there on a device."""
        if self._is_inside or func is DEVICE:
            return super().dispatch(func, types, args, kwargs)
        with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]  # or function modes would see each look at a shape
            return self._counted(func, types, args, kwargs)

    def _counted(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if _draws(func, args, kwargs):
            set_draws(draws() + 1)
        flops, cached = self.flops, self.cache_enabled
        self.cache_enabled = cached and func not in _KEEPS_STORAGES
        try:
            out = super().dispatch(func, types, args, kwargs)
        finally:
            self.cache_enabled = cached
        made = [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(t, torch.Tensor)]
        made = [tensor for tensor in made if _device_of(tensor).type not in self._on_host]
        if self.use is not None:
            for tensor in made:
                self.live.note(tensor, self.use)
        if self._timeline is not None and made:  # to ask for a device or a size takes no memory
            assert self._places is not None
            self._timeline.write(self._places.here(), func, args, made, self.flops - flops)
        return out

    def _ask(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Answer as before where nothing but looks decides it."""
        ask = functools.partial(super()._ask, func, types, args, kwargs)
        return self._answers.answer(func, args, kwargs or {}, ask)

    def is_of(self, device: torch.device) -> None:
        """Count the memory of this device: beside an accelerator the CPU's is the host's."""
        if device.type != "cpu":
            self._on_host.add("cpu")

    def begin_step(self, model: nn.Module) -> Timeline:
        """Count the operators of a step from 0, and write its timeline."""
        self.live.restart()
        self._places = Places(model)
        self._timeline = Timeline(self.live)
        return self._timeline

    def end_step(self) -> None:
        """Stop writing."""
        if self._places is not None:
            self._places.close()
        self._timeline = self._places = None


def _device_of(tensor: torch.Tensor) -> torch.device:
    """Return a tensor's device; a fake tensor asks its mode for it, which takes as long as an operator."""
    return tensor.fake_device if type(tensor) is FakeTensor else tensor.device


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Tell whether an operator draws random numbers; attention without dropout, which is said to, does not."""
    if (position := _dropout_position(func)) is None:
        return torch.Tag.nondeterministic_seeded in func.tags
    given = args[position] if position < len(args) else (kwargs or {}).get("dropout_p", 0.0)
    return bool(given)


@functools.cache
def _dropout_position(func: Any) -> int | None:
    names = [argument.name for argument in func._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None
