"""Keep nothing of a region's forward: what the full mode does."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from memopt.runtime.replay.frame import Frame, Handle
from memopt.runtime.replay.standing import Standins


class Watch(Protocol):
    """What sees to the saves of one forward call of a region."""

    def pack(self, tensor: torch.Tensor) -> Handle:
        """Drop one saved tensor, or keep it: the hook that autograd calls."""

    def active(self) -> AbstractContextManager[None]:
        """Watch what else has to be seen while the forward runs."""

    def close(self) -> tuple[int, Standins | None, int]:
        """End with the forward; return how many saves a replay has to reach, what it need not compute, and kept bytes."""


class Dropping:
    """Drop all saves."""

    def __init__(self, frame: Frame, pack: Callable[[torch.Tensor], Handle]) -> None:
        self._frame = frame
        self.pack = pack

    def active(self) -> AbstractContextManager[None]:
        """Watch nothing."""
        return nullcontext()

    def close(self) -> tuple[int, None, int]:
        """Return that all saves are needed."""
        return self._frame.num_saves, None, 0
