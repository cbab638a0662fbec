"""Offer what a recomputed part returns to the layer around it: who saves it then saves a recipe."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memopt.operands import PLAIN
from memopt.runtime.replay.arguments import Arguments, Hooks
from memopt.runtime.replay.frame import Frame, Handle, tensors_of
from memopt.tensors import NOTHING, Source, is_odd, source_of_casts, storage_key, storage_keys


class Output:
    """One tensor that a recomputed part has returned, as long as the forward around it runs."""

    __slots__ = ("_dtype", "_reference", "_version", "_witness", "geometry", "handle", "is_proven", "source", "storage")

    def __init__(self, tensor: torch.Tensor, handle: Handle, *, is_proven: bool) -> None:
        storage = tensor.untyped_storage()
        self._reference = StorageWeakRef(
            storage
        )  # its identity is not given to another storage, though it may be freed
        self._dtype = tensor.dtype
        self._version = tensor._version
        self._witness = tensor.detach()  # shares its version, but none of its memory
        self._witness.data = NOTHING
        self.is_proven = is_proven
        """Whether a replay was seen to make what the part gives out."""
        self.source = source_of_casts(tensor)
        self.storage = storage._cdata
        self.geometry = tensor.stride(), tensor.storage_offset()
        self.handle = handle

    def is_seen_in(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor on its storage is a view of the values that were given out."""
        return tensor._version == self._version and tensor.dtype is self._dtype and not is_odd(tensor)

    def is_cast_in(self, tensor: torch.Tensor, source: Source) -> bool:
        """Tell whether a tensor, which was cast from a source, is a cast of the values that were given out."""
        return source == self.source and tensor._version == 0 and self._witness._version == self._version


def offer_outputs(
    frame: Frame, output: Any, arguments: Arguments, carried: Iterable[torch.Tensor], *, is_proven: bool
) -> tuple[int, ...]:
    """Offer the tensors that a region has made, and return which of them.

    What lies in the storage of an argument, or of what the modules of the region carry, is not made in it.
    """
    if arguments.outer is None:
        return ()
    given = storage_keys((*(leaf.tensor for leaf in arguments.leaves), *arguments.parameters, *carried))
    tensors = tensors_of(output)
    numbers = tuple(n for n, tensor in enumerate(tensors) if _is_plain(tensor) and storage_key(tensor) not in given)
    offer(frame, tensors, numbers, arguments.outer, is_proven=is_proven)
    return numbers


def offer(
    frame: Frame, tensors: Sequence[torch.Tensor], numbers: tuple[int, ...], outer: Hooks, *, is_proven: bool = True
) -> None:
    """Offer some of the tensors that a region has returned to the layer around it, if that takes any."""
    take: Callable[[Output], None] | None = getattr(getattr(outer[0], "__self__", None), "take", None)
    if take is not None:
        for number in numbers:
            take(Output(tensors[number], frame.offer(tensors[number], number), is_proven=is_proven))


def has_taker() -> bool:
    """Tell whether what sees to the saves of this thread takes outputs."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return outer is not None and hasattr(getattr(outer[0], "__self__", None), "take")


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in PLAIN and tensor.layout is torch.strided and not is_odd(tensor)
