"""Where the results of functions are found in a forward without watching the functions, and how that is proven."""

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from memopt.autograd import packed_by
from memopt.runtime.replay.frame import Frame, Handle
from memopt.tensors import VIEWS

_MAX_VIEWS = 8

SAME_VERSION = VIEWS - {"UnsafeViewBackward0"}
"""The views that count writes together with what they are views of."""

Function = Callable[..., Any]

Geometry = tuple[torch.Size, tuple[int, ...], int, torch.dtype]
"""How a tensor lies in its storage: shape, stride, offset and type."""


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """Return how a tensor lies in its storage."""
    return tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function that the policy names."""

    number: int
    """Among all such calls in the region."""
    func: Function
    begin: int
    """How many saves of the region had been made when it began."""
    end: int
    """And when it returned."""
    looks: tuple[Any, ...]
    """What its arguments looked like."""

    def returned(self, tensor: torch.Tensor, frame: Frame, views: Set[str] = VIEWS) -> bool:
        """Tell whether a tensor is the output of this call, or a view of it.

        Then views lead to the node of the call, which has a save of the frame at a position of the call.
        """
        node = tensor.grad_fn
        for _ in range(_MAX_VIEWS):
            if node is None or node.name() not in views:
                break
            node = node.next_functions[0][0]
        return node is not None and any(self._is_save(packed, frame) for packed in packed_by(node))

    def _is_save(self, packed: Any, frame: Frame) -> bool:
        return type(packed) is Handle and packed.frame is frame and self.begin <= packed.position < self.end


class Place(NamedTuple):
    """Where in a forward the output of a function can be found, or a view of it."""

    geometry: Geometry
    position: int
    """Which save it is; or, if a module returned it, how many had been made then."""
    module: int | None = None
    """The module, by identity."""
    leaf: int | None = None
    """Where in the output of the module; None for the output itself."""

    def leaf_of(self, output: Any) -> Any:
        """Return what stands in this place of a module's output."""
        if self.leaf is None:
            return output
        return output[self.leaf] if isinstance(output, (tuple, list)) and len(output) > self.leaf else None
