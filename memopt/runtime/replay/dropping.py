"""Keep nothing of a region's forward: what the full mode does."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from memopt.runtime.replay.frame import Frame, Handle
from memopt.runtime.replay.watch import Ended


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
