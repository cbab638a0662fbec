"""Keep nothing of a region's forward: what the full mode does."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch

from memopt.runtime.replay.frame import Frame, Handle
from memopt.runtime.replay.standing import Standins


class Ended(NamedTuple):
    """What a forward leaves behind when it has ended."""

    num_needed: int
    """How many saves its replay has to reach."""
    standins: Standins | None
    """What the replay need not compute."""
    num_bytes: int
    """Of all that is kept."""


class Watch(Protocol):
    """What sees to the saves of one forward call of a region."""

    def pack(self, tensor: torch.Tensor) -> Handle:
        """Drop one saved tensor, or keep it: the hook that autograd calls."""

    def active(self) -> AbstractContextManager[None]:
        """Watch what else has to be seen while the forward runs."""

    def close(self) -> Ended:
        """End with the forward."""


class Dropping:
    """Drop all saves."""

    def __init__(self, frame: Frame, pack: Callable[[torch.Tensor], Handle]) -> None:
        self._frame = frame
        self.pack = pack

    def active(self) -> AbstractContextManager[None]:
        """Watch nothing."""
        return nullcontext()

    def close(self) -> Ended:
        """End with the forward: all saves are needed."""
        return Ended(self._frame.num_saves, None, 0)
