"""What sees to the saves of one forward call of a region, and what it leaves behind."""

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from memopt.runtime.replay.frame import Handle
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
