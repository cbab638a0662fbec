"""CUDA, XPU, NPU: pinned host memory and two copy streams, since the bus is duplex."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from memopt.runtime.backends.base import Copies, Event


@dataclass(slots=True, eq=False)
class StreamEvent:
    """An event on a copy stream, and the compute stream whose work the copies followed."""

    native: torch.Event
    origin: torch.Stream
    is_captured: bool = False
    """Whether it is a node of a CUDA graph: nobody can ask it then whether it has passed."""
    _has_passed: bool = False

    @property
    def origin_id(self) -> int:
        """The number of that compute stream."""
        return self.origin.stream_id

    def done(self) -> bool:
        """Tell whether the device has passed the event.

        Within a capture nothing that was captured has; what was before has, for a capture begins with a synchronisation.
        """
        if self.is_captured:
            return not is_capturing(self.origin.device)
        if self._has_passed or is_capturing(self.origin.device):
            return True
        self._has_passed = self.native.query()  # the driver is asked for no event again that has
        return self._has_passed


def is_capturing(device: torch.device) -> bool:
    """Tell whether the current stream of a device is being captured into a graph."""
    return bool(_capture_query(device.type)())


@functools.cache
def _capture_query(device_type: str) -> Callable[[], bool]:
    return getattr(torch.get_device_module(device_type), "is_current_stream_capturing", bool)


class AcceleratorBackend:
    """Copy on side streams of one accelerator; every edge between streams is an event."""

    slab_bytes = 256 << 20

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._index = device.index if device.index is not None else torch.accelerator.current_device_index()
        self._out = torch.Stream(device)
        self._in = torch.Stream(device)

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        """Return pinned memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy_out(self, copies: Copies) -> StreamEvent:
        """Copy device to host on the copy-out stream, after the current stream."""
        return self._copy(self._out, copies, ())

    def copy_in(self, copies: Copies, after: Iterable[Event]) -> StreamEvent:
        """Copy host to device on the copy-in stream, after the current stream, in which the targets were allocated."""
        return self._copy(self._in, copies, after)

    def here(self) -> int:
        """Return the current stream's number."""
        return torch.accelerator.current_stream(self._index).stream_id

    def wait(self, event: Event, target: torch.Tensor) -> None:
        """Make the current stream wait."""
        assert isinstance(event, StreamEvent)
        current = torch.accelerator.current_stream(self._index)
        current.wait_event(event.native)
        if current.stream_id != event.origin.stream_id:
            # Its memory belongs to the stream that prefetched it, whose allocator must not hand it out too early.
            target.record_stream(current)

    def release_after(self, event: Event) -> None:
        """Make the stream that the copied tensors belong to wait: its allocator may then hand their memory out."""
        assert isinstance(event, StreamEvent)
        event.origin.wait_event(event.native)

    def _copy(self, stream: torch.Stream, copies: Copies, after: Iterable[Event]) -> StreamEvent:
        origin = torch.accelerator.current_stream(self._index)
        stream.wait_event(origin.record_event())
        for event in after:
            assert isinstance(event, StreamEvent)
            stream.wait_event(event.native)
        sources, targets = zip(*copies, strict=True)
        with stream:
            torch._foreach_copy_(targets, sources, non_blocking=True)
        return StreamEvent(stream.record_event(), origin, is_capturing(self.device))

    def is_capturing(self) -> bool:
        """Tell whether the current stream is being captured into a graph."""
        return is_capturing(self.device)
