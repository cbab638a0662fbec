"""Fake tensors whose bytes are counted, operator by operator."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memopt.analyze.fake import TraceMode
from memopt.predict.live import LiveBytes, Use
from memopt.predict.places import Places

_KEEPS_STORAGES = frozenset({torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset})
"""FakeTensorMode's cache would keep the storage that these are called with."""


@dataclass
class Timeline:
    """What is alive after each operator of a step."""

    totals: list[int] = field(default_factory=list)
    places: list[tuple[str, str]] = field(default_factory=list)
    """(module, node of the backward)."""
    operators: list[Any] = field(default_factory=list)
    peak_by_use: dict[Use, int] = field(default_factory=dict)
    peak_bytes: int = 0


class CountingMode(TraceMode):
    """Answer operators on fake tensors, count the storages that they make, and write down the timeline of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.live = LiveBytes()
        self.use = Use.PARAMETERS
        """What the storages that are made now are for."""
        self.lasting: frozenset[int] = frozenset()
        """The numbers within a step of the storages that are alive at the end of its forward."""
        self._began_at = 0
        self._timeline: Timeline | None = None
        self._places: Places | None = None

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer an operator and count what it makes; what it is made of itself is not there on a device."""
        if self._is_inside:
            return super().dispatch(func, types, args, kwargs)
        cached, self.cache_enabled = self.cache_enabled, self.cache_enabled and func not in _KEEPS_STORAGES
        try:
            out = super().dispatch(func, types, args, kwargs)
        finally:
            self.cache_enabled = cached
        made = [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(t, torch.Tensor)]
        self._count(made)
        if self._timeline is not None and made:  # to ask for a device or a size takes no memory
            self._write(self._timeline, func)
        return out

    def begin_step(self, model: nn.Module | None = None) -> Timeline | None:
        """Count the storages of a step from 0; with the model, write its timeline."""
        self._began_at = self.live.num_made
        self._places = Places(model) if model is not None else None
        self._timeline = Timeline() if model is not None else None
        return self._timeline

    def end_forward(self) -> None:
        """Note which storages of the step are alive now: in the next one they are activations from the start."""
        self.lasting = self.live.numbers_since(self._began_at)

    def end_step(self) -> None:
        """Stop writing."""
        if self._places is not None:
            self._places.close()
        self._timeline = self._places = None

    def _count(self, made: list[torch.Tensor]) -> None:
        for tensor in made:
            if tensor.device.type != "meta":  # those are on the host
                self.live.note(tensor, self._use_of_next())

    def _use_of_next(self) -> Use:
        if self.use is not Use.WORKSPACE:
            return self.use
        is_lasting = self.live.num_made - self._began_at in self.lasting
        return Use.ACTIVATIONS if is_lasting else Use.WORKSPACE

    def _write(self, timeline: Timeline, func: Any) -> None:
        assert self._places is not None
        timeline.totals.append(self.live.total)
        timeline.places.append(self._places.here())
        timeline.operators.append(func)
        if self.live.total > timeline.peak_bytes:
            timeline.peak_bytes, timeline.peak_by_use = self.live.total, dict(self.live.by_use)
