"""One storage on its way to the host and back."""

import enum
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

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


def gathered(view: torch.Tensor) -> torch.Tensor:
    """Return a view's values in their order, in a storage of their own."""
    with torch.no_grad(), torch.inference_mode(False):
        return torch.empty(view.shape, dtype=view.dtype, device=view.device).copy_(view)


class Leftover(NamedTuple):
    """What a dead slot leaves behind, to be given back once `event` is done."""

    host: Block | None
    device: torch.Tensor | None
    event: Event | None


class Slot:
    """One version of one storage, and whatever copies of it there are.

    Handles own it: when the last one dies, whether backward is done or the graph was dropped, so does the slot.
    """

    __slots__ = (
        "__weakref__", "_gathers", "_storage", "device", "engine", "event", "host", "is_compact", "num_bytes", "readers",
        "state", "version",
    )  # fmt: skip

    def __init__(self, engine: "Engine", tensor: torch.Tensor, *, gathers: bool = False) -> None:
        storage = tensor.untyped_storage()
        self._storage = StorageWeakRef(storage)
        """Keeps the storage's identity from being given to another one."""
        self.engine = engine
        self.version = tensor._version
        """What the version of `device` must be as long as nobody has written to it."""
        self._gathers = gathers
        self.is_compact = False
        """Whether it holds one view's values, in their order, instead of the whole storage."""
        self.num_bytes = tensor.numel() * tensor.element_size() if gathers else storage.nbytes()
        self.device: torch.Tensor | None = tensor.detach()
        """A tensor on the storage, not the tensor that was saved: that one would keep its own graph alive."""
        self.host: Block | None = None
        self.event: Event | None = None
        self.state = State.RESIDENT
        self.readers: set[int] | None = None
        """The streams that have waited for the copy-in, of all that came with it; None as long as there was none."""

    def flat(self) -> torch.Tensor:
        """Return what is to be copied out as flat bytes; a view is gathered now, and its storage let go."""
        assert self.device is not None
        if self._gathers:
            self.device, self.is_compact = gathered(self.device), True
            self.version = self.device._version
        return torch.empty(0, dtype=torch.uint8, device=self.device.device).set_(self.device.untyped_storage())

    def __del__(self) -> None:
        # May run inside the garbage collector, under the engine's lock, in any thread: so only note what is left.
        in_flight = self.state in (State.OFFLOADING, State.STAYING, State.LOADING)
        self.engine.leftovers.append(Leftover(self.host, self.device if in_flight else None, self.event))
