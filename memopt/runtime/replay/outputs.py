"""Offer what a recomputed part returns to the layer around it: who saves it then saves a recipe."""

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memopt.operands import PLAIN
from memopt.runtime.replay.arguments import Arguments, Hooks
from memopt.runtime.replay.frame import Frame, Handle, tensors_of
from memopt.tensors import is_odd, storage_key


class Output:
    """One tensor that a recomputed part has returned, as long as the forward around it runs."""

    __slots__ = ("_node", "_reference", "geometry", "handle", "storage", "version")

    def __init__(self, tensor: torch.Tensor, handle: Handle) -> None:
        storage = tensor.untyped_storage()
        self._reference = StorageWeakRef(
            storage
        )  # its identity is not given to another storage, though it may be freed
        self._node = tensor.grad_fn
        self.storage = storage._cdata
        self.version = tensor._version
        self.geometry = tensor.stride(), tensor.storage_offset()
        self.handle = handle

    def is_source_of(self, node: Any) -> bool:
        """Tell whether an autograd node is the one that made it."""
        return self._node is not None and self._node is node


def offer_outputs(frame: Frame, output: Any, arguments: Arguments) -> tuple[int, ...]:
    """Offer the tensors that a region has made, and return which of them: one in an argument's storage is not its own."""
    if arguments.outer is None:
        return ()
    given = {storage_key(leaf.tensor) for leaf in arguments.leaves if leaf.tensor.layout is torch.strided}
    numbers = tuple(
        n for n, tensor in enumerate(tensors_of(output)) if _is_plain(tensor) and storage_key(tensor) not in given
    )
    offer(frame, output, numbers, arguments.outer)
    return numbers


def offer(frame: Frame, output: Any, numbers: tuple[int, ...], outer: Hooks) -> None:
    """Offer some of the tensors that a region has returned to the layer around it, if that takes any."""
    take: Callable[[Output], None] | None = getattr(getattr(outer[0], "__self__", None), "take", None)
    if take is not None:
        tensors = [output] if isinstance(output, torch.Tensor) else tensors_of(output)
        for number in numbers:
            take(Output(tensors[number], frame.offer(tensors[number], number)))


def has_taker() -> bool:
    """Tell whether what sees to the saves of this thread takes outputs."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return outer is not None and hasattr(getattr(outer[0], "__self__", None), "take")


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in PLAIN and tensor.layout is torch.strided and not is_odd(tensor)
