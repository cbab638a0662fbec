"""What autograd holds in the place of a saved tensor that a recomputed part of the layer gave out."""

from typing import TYPE_CHECKING

import torch

from memopt.errors import ReplayError
from memopt.runtime.handles import Gone
from memopt.runtime.replay.outputs import Output

if TYPE_CHECKING:
    from memopt.runtime.parts import PartsGroup


class Recipe(Gone):
    """A saved tensor of which nothing is kept: a replay of the part that gave it out makes it again."""

    __slots__ = ("_cast", "_geometry", "_output")

    def __init__(self, group: "PartsGroup", tensor: torch.Tensor, output: Output, *, casts: bool = False) -> None:
        super().__init__(group, tensor)
        self._output = output.handle
        self._geometry = output.geometry
        self._cast = tensor.dtype if casts else None

    def unpack(self) -> torch.Tensor:
        """Return the tensor, exact in class, dtype, size and stride; raise as `Kept.unpack`, and ReplayError."""
        self.reach()
        made = self._output.frame.value_of(self._output.position)
        if (made.stride(), made.storage_offset()) != self._geometry:
            raise ReplayError(self._group.fqn, f"gave an output other strides than the forward did: {made.stride()}")
        if self._cast is not None:
            made = made.to(self._cast)
        return made.as_strided(self._shape, self._stride, self._offset)
