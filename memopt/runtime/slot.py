"""One storage on its way to the host and back."""

import enum
from typing import TYPE_CHECKING, NamedTuple

import torch

from memopt.runtime.backends import Event
from memopt.runtime.pool import Block

if TYPE_CHECKING:
    from memopt.runtime.engine import Engine


class State(enum.Enum):
    """Where a slot's bytes are."""

    RESIDENT = enum.auto()
    """On the device only, or on it again."""
    OFFLOADING = enum.auto()
    """On the device, while a copy to the host runs."""
    STAYING = enum.auto()
    """On the device, and wanted there again before the copy to the host has ended."""
    HOST = enum.auto()
    LOADING = enum.auto()
    """On the host, while a copy to the device runs."""
    STALE = enum.auto()
    """Overwritten in place before it was copied; whoever unpacks it gets an error."""


class Leftover(NamedTuple):
    """What a dead slot leaves behind, to be given back once `event` is done."""

    host: Block | None
    device: torch.Tensor | None
    event: Event | None


class Slot:
    """One version of one storage, and whatever copies of it there are.

    Handles own it: when the last one dies, whether backward is done or the graph was dropped, so does the slot.
    """

    __slots__ = ("__weakref__", "device", "engine", "event", "host", "num_bytes", "readers", "state", "version")

    def __init__(self, engine: "Engine", tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.engine = engine
        self.version = tensor._version
        """What the version of `device` must be as long as nobody has written to it."""
        self.num_bytes = storage.nbytes()
        self.device: torch.Tensor | None = tensor.detach()
        """A tensor on the storage, not the tensor that was saved: that one would keep its own graph alive."""
        self.host: Block | None = None
        self.event: Event | None = None
        self.state = State.RESIDENT
        self.readers: set[int] | None = None
        """The streams that have waited for the copy-in; None as long as there was no copy-in."""

    def flat(self) -> torch.Tensor:
        """Return the whole storage on the device as flat bytes."""
        assert self.device is not None
        return torch.empty(0, dtype=torch.uint8, device=self.device.device).set_(self.device.untyped_storage())

    def __del__(self) -> None:
        # May run inside the garbage collector, under the engine's lock, in any thread: so only note what is left.
        in_flight = self.state in (State.OFFLOADING, State.STAYING, State.LOADING)
        self.engine.leftovers.append(Leftover(self.host, self.device if in_flight else None, self.event))
