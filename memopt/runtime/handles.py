"""What autograd holds in the place of a saved tensor."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from memopt.errors import SavedTensorModifiedError
from memopt.runtime.slot import Slot, State
from memopt.tensors import NOTHING, is_parameter

if TYPE_CHECKING:
    from memopt.runtime.group import Group
    from memopt.runtime.recipe import Recipe

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class Kept:
    """A saved tensor that stays on the device, or is left to the hooks around the region."""

    __slots__ = ("__weakref__", "_group", "_unpack", "_value", "_version")

    def __init__(self, group: "Group", tensor: torch.Tensor, outer: Hooks | None) -> None:
        self._group = group
        self._version = tensor._version
        # A tensor that has a grad_fn, or is given one in place, would keep its own graph alive for ever if it were
        # held here. A parameter itself has none, and sees what is assigned to its .data, as without hooks.
        own = is_parameter(tensor)
        self._value = outer[0](tensor) if outer else tensor if own else tensor.detach()
        self._unpack = outer[1] if outer else None

    def unpack(self) -> torch.Tensor:
        """Return the tensor; raise SavedTensorModifiedError if it was written to since."""
        self._group.reach()
        if self._unpack is not None:
            return self._unpack(self._value)
        check_version(self._group, self._value, self._version, self._value.shape)
        return self._value


class Gone:
    """A saved tensor that is not on the device: its geometry, and what tells whether it was written to."""

    __slots__ = ("__weakref__", "_group", "_offset", "_shape", "_stride", "_version", "_witness")

    def __init__(self, group: "Group", tensor: torch.Tensor) -> None:
        self._group = group
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset()
        self._version = tensor._version
        # Shares the tensor's version counter, but none of its memory.
        self._witness = tensor.detach()
        self._witness.data = NOTHING

    def reach(self) -> None:
        """Note that backward is here; raise SavedTensorModifiedError if the tensor was written to since."""
        self._group.reach()
        check_version(self._group, self._witness, self._version, self._shape)


class Swapped(Gone):
    """A saved tensor whose storage is a slot; many of these may share one."""

    __slots__ = ("_dtype", "_slot")

    def __init__(self, group: "Group", tensor: torch.Tensor, slot: Slot) -> None:
        super().__init__(group, tensor)
        self._slot = slot
        self._dtype = tensor.dtype

    def unpack(self) -> torch.Tensor:
        """Return the tensor, exact in class, dtype, size and stride; raise as `Kept.unpack`."""
        self.reach()
        if self._slot.state is State.STALE:  # written to through another tensor on the storage, with its own version
            raise SavedTensorModifiedError(self._group.fqn, tuple(self._shape), self._version, self._version + 1)
        whole = self._slot.engine.tensor_of(self._slot, self._group.counters)
        # A backward may write to what it unpacked. A view shares its version, so whoever unpacks it next is told.
        check_version(self._group, whole, self._slot.version, self._shape)
        if self._slot.is_compact:
            return self._spread(whole)
        if whole.dtype is not self._dtype:
            has_returned = self._slot.readers is not None and self._slot.num_bytes % self._dtype.itemsize == 0
            whole = whole.view(self._dtype) if has_returned else _viewed(whole, self._dtype)
        return whole.as_strided(self._shape, self._stride, self._offset)

    def move_to(self, slot: Slot) -> None:
        """Be a handle on another slot of the same values."""
        self._slot = slot

    def _spread(self, whole: torch.Tensor) -> torch.Tensor:
        """Return gathered values with the strides that were saved: kernels choose their way by them."""
        flat = whole.view(-1) if whole.dtype is self._dtype else _viewed(whole, self._dtype)
        values = flat.view(self._shape)
        if values.stride() == self._stride:
            return values
        with torch.no_grad(), torch.inference_mode(False):
            made = spot = torch.empty_strided(self._shape, self._stride, dtype=self._dtype, device=values.device)
            for dim, (size, step) in enumerate(zip(self._shape, self._stride, strict=True)):
                if step == 0 and size > 1:  # expanded: nothing may be copied to one place many times
                    spot, values = spot.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
            spot.copy_(values)
            return made


def unpack(handle: "Kept | Swapped | Recipe") -> torch.Tensor:
    """Return what a handle stands for: the hook that autograd calls in backward."""
    return handle.unpack()


def _viewed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat view of a tensor's whole storage in another dtype."""
    num_bytes = tensor.untyped_storage().nbytes() // dtype.itemsize * dtype.itemsize
    flat = tensor.as_strided((num_bytes // tensor.element_size(),), (1,), 0)
    return flat.view(dtype)


def check_version(group: "Group", witness: torch.Tensor, saved_version: int, shape: Iterable[int]) -> None:
    """Raise SavedTensorModifiedError if a tensor was written to since it was saved."""
    if witness._version != saved_version:
        raise SavedTensorModifiedError(group.fqn, tuple(shape), saved_version, witness._version)
