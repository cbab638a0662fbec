"""One replay of a region: what the forward saves again goes to where it is missing, and nothing runs beyond that."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.eval_frame import skip_code

from memopt.autograd import sequence_number

if TYPE_CHECKING:
    from memopt.runtime.replay.frame import Frame


class Filling:
    """One replay: give the frame what it misses as the forward saves it again, by position."""

    def __init__(
        self, frame: "Frame", missing: set[int], last_needed: int | None, has_drawn: Callable[[], bool]
    ) -> None:
        self.frame = frame
        self._missing = missing
        self._last_needed = last_needed
        self._position = 0
        self._last_operation = 0
        """The number of the node whose save was filled last; an operation may have several saves."""
        self._has_drawn = has_drawn

    @property
    def position(self) -> int:
        """How many tensors were saved so far."""
        return self._position

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take one saved tensor: the hook that autograd calls in the replay."""
        if not self._missing and sequence_number() != self._last_operation:
            raise _Filled(self)  # not before: the operation that saves a tensor may fill it after that
        if self._position in self._missing and not self.frame.is_output(self._position):
            self.frame.fill(self._position, tensor)
            self._missing.remove(self._position)
            if not self._missing:
                self._last_operation = sequence_number()
        self.skip()
        return tensor.detach()

    def skip(self) -> None:
        """Pass over one save that needs no tensor; end the replay where nothing comes after it."""
        self._position += 1
        if self._missing or self._last_needed is None or self._position <= self._last_needed:
            return
        if self._has_drawn():  # else the operation under way may draw what it saves: RReLU does
            raise _Filled(self)

    def end_if_filled(self) -> None:
        """End the replay where nothing is missing and no operation is under way."""
        if not self._missing:
            raise _Filled(self)

    def run(self, forward: Callable[[], Any]) -> None:
        """Call a forward and end it as soon as nothing is missing any more.

        The exception must go no further than this, and lose its traceback here: what passes it on (an ExitStack) keeps
        it in a cycle with the frames, the saved tensors in them, until Python's collector comes.
        """
        try:
            self.frame.fill_outputs(forward())
        except _Filled as stop:
            if stop.filling is not self:
                raise
            stop.__traceback__ = None


class _Filled(BaseException):
    """Not an error, so that no forward catches it as one."""

    def __init__(self, filling: Filling) -> None:
        super().__init__()
        self.filling = filling


skip_code(Filling.pack.__code__)  # a module that is compiled inside a region calls it: it is nothing to compile
