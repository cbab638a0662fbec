"""What the swap engine asks of a device."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(source, target) pairs of flat uint8 tensors of equal size."""


class Event(Protocol):
    """The end of one batch of copies."""

    @property
    def origin_id(self) -> int:
        """The number of the stream whose computation the copies followed, as `Backend.here` gives it."""

    @property
    def is_captured(self) -> bool:
        """Whether they are a part of a graph that runs again and again, from and to the same memory."""

    def done(self) -> bool:
        """Tell, without waiting, whether the copies have ended."""


class Backend(Protocol):
    """Move bytes between one device and the host, beside the computation."""

    slab_bytes: int
    """How much host memory to take at a time."""
    device: torch.device

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        """Return a flat uint8 host tensor that copies can run beside computation from and to."""

    def copy_out(self, copies: Copies) -> Event:
        """Copy device to host once the computation issued so far is done."""

    def copy_in(self, copies: Copies, after: Iterable[Event]) -> Event:
        """Copy host to device once `after` and the computation issued so far are done."""

    def here(self) -> int:
        """Return which stream the caller computes on."""

    def wait(self, event: Event, target: torch.Tensor) -> None:
        """Make what the caller computes from now on wait for the copy into a tensor."""

    def is_capturing(self) -> bool:
        """Tell whether what is issued now is captured into a graph instead of run."""

    def release_after(self, event: Event) -> None:
        """Make memory that a copy-out read from safe to be used again by the computation that made it."""
