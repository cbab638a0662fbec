"""What autograd holds in the place of a saved tensor that a recomputed part of the layer gave out."""

from typing import TYPE_CHECKING

import torch

from memopt.errors import ReplayError
from memopt.runtime.handles import Gone, check_version
from memopt.runtime.replay.outputs import Output
from memopt.runtime.replay.proof import Samples

if TYPE_CHECKING:
    from memopt.runtime.parts import PartsGroup


class Recipe(Gone):
    """A saved tensor of which nothing is kept: a replay of the part that gave it out makes it again."""

    __slots__ = ("_cast", "_geometry", "_output", "_samples")

    def __init__(self, group: "PartsGroup", tensor: torch.Tensor, output: Output, *, casts: bool = False) -> None:
        super().__init__(group, tensor)
        self._output = output.handle
        self._geometry = output.geometry
        self._cast = tensor.dtype if casts else None
        self._samples = None if output.is_proven else Samples({0: tensor.detach()})

    def unpack(self) -> torch.Tensor:
        """Return the tensor, exact in class, dtype, size and stride; raise as `Kept.unpack`, and ReplayError."""
        self.reach()
        frame = self._output.frame
        made = frame.value_of(self._output.position)
        if (made.stride(), made.storage_offset()) != self._geometry:
            raise ReplayError(frame.fqn, f"gave an output other strides than the forward did: {made.stride()}")
        # A backward may write to what it unpacked. A view shares its version, so whoever unpacks it next is told.
        check_version(self._group, made, frame.version_of(self._output.position), self._shape)
        if self._cast is not None:
            made = made.to(self._cast)
        again = made.as_strided(self._shape, self._stride, self._offset)
        self._prove(again)
        return again

    def _prove(self, again: torch.Tensor) -> None:
        """Once, hold a few values against those that were saved: a write may have come in between that no version shows."""
        if self._samples is not None:
            self._samples.check(self._output.frame.fqn, {0: again})
            self._samples = None
