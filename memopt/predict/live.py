"""Count the bytes of the tensors that are alive, as a caching allocator hands them out."""

import weakref
from enum import Enum, auto

import torch

BLOCK_BYTES = 512
"""What CUDA's allocator rounds a tensor up to (c10/cuda/CUDACachingAllocator)."""


class Use(Enum):
    """What a live storage is for."""

    PARAMETERS = auto()
    OPTIMIZER = auto()
    GRADIENTS = auto()
    ACTIVATIONS = auto()
    """Of the forward, and alive at its end."""
    WORKSPACE = auto()


class LiveBytes:
    """The storages that are alive, each once, with their bytes and what they are for."""

    def __init__(self) -> None:
        self.by_use = dict.fromkeys(Use, 0)
        self.total = 0
        self.num_made = 0
        """How many storages were seen so far: the number that the next one gets."""
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int]] = {}
        """By identity: a reference, the bytes, the number."""
        self._uses: dict[int, Use] = {}

    def note(self, tensor: torch.Tensor, use: Use) -> int | None:
        """Count a tensor's storage from now on until it is freed; return its number if it is a new one."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return None
        num_bytes = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        self._storages[key] = weakref.ref(storage, lambda _: self._free(key, num_bytes)), num_bytes, self.num_made
        self._uses[key] = use
        self.by_use[use] += num_bytes
        self.total += num_bytes
        self.num_made += 1
        return self.num_made - 1

    def numbers_since(self, number: int) -> frozenset[int]:
        """Return the numbers, counted from one on, of those that are alive."""
        return frozenset(made - number for _, _, made in self._storages.values() if made >= number)

    def is_for(self, tensor: torch.Tensor, use: Use) -> None:
        """Note what a storage that is counted already turns out to be for."""
        key = tensor.untyped_storage()._cdata
        if key in self._storages:
            num_bytes = self._storages[key][1]
            self.by_use[self._uses[key]] -= num_bytes
            self.by_use[use] += num_bytes
            self._uses[key] = use

    def _free(self, key: int, num_bytes: int) -> None:
        del self._storages[key]
        self.by_use[self._uses.pop(key)] -= num_bytes
        self.total -= num_bytes
