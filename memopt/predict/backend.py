"""A device without memory: copies take no time, or as much as they may."""

from collections.abc import Callable, Iterable

import torch

from memopt.runtime.backends import Copies, Event


class FakeEvent:
    """The end of one batch of copies."""

    is_captured = False
    origin_id = 0

    def __init__(self, *, has_ended: bool) -> None:
        self._has_ended = has_ended

    def done(self) -> bool:
        """Tell whether the copies have ended."""
        return self._has_ended

    def wait(self) -> None:
        """Let them have ended."""
        self._has_ended = True


class FakeBackend:
    """Copy nothing; a copy out has ended at once, or when somebody waits for it: the two ends of what a run may do."""

    slab_bytes = 256 << 20

    def __init__(
        self,
        device: torch.device,
        *,
        ends_at_once: bool,
        came_back: Callable[[torch.Tensor], None] = lambda target: None,
    ) -> None:
        self.device = device
        self._ends_at_once = ends_at_once
        self._came_back = came_back
        """Is told of each tensor that is copied back in."""

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        """Return host memory, which is not counted: a meta tensor."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    def copy_out(self, copies: Copies) -> FakeEvent:
        """Begin a copy out."""
        return FakeEvent(has_ended=self._ends_at_once)

    def copy_in(self, copies: Copies, after: Iterable[Event]) -> FakeEvent:
        """Copy in; its target takes its memory now, whenever the copy ends."""
        for _, target in copies:
            self._came_back(target)
        return FakeEvent(has_ended=True)

    def here(self) -> int:
        """Return the one stream there is."""
        return 0

    def wait(self, event: Event, target: torch.Tensor) -> None:
        """Wait for a copy in."""

    def is_capturing(self) -> bool:
        """Return False: there are no graphs."""
        return False

    def release_after(self, event: Event) -> None:
        """Wait for a copy out."""
        assert isinstance(event, FakeEvent)
        event.wait()
