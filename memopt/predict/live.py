"""Count the bytes of the tensors that are alive, as a caching allocator hands them out."""

import weakref
from dataclasses import dataclass

import torch

from memopt.ir import Use

BLOCK_BYTES = 512
"""What CUDA's allocator rounds a tensor up to (c10/cuda/CUDACachingAllocator)."""


@dataclass(slots=True)
class Life:
    """A storage from the operator that made it to the one before which it was freed, by their numbers in the step."""

    num_bytes: int
    use: Use
    made_at: int
    freed_at: int | None = None


class LiveBytes:
    """The storages that are alive, each once, and their lives since a step began."""

    @property
    def total(self) -> int:
        """How many bytes are alive."""
        return sum(life.num_bytes for _, life in self._alive.values())

    def __init__(self) -> None:
        self.now = 0
        """The number of the operator that runs."""
        self.lives: list[Life] = []
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], Life]] = {}

    def note(self, tensor: torch.Tensor, use: Use) -> None:
        """Count a tensor's storage from now on until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        num_bytes = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        life = Life(num_bytes, use, self.now)
        self._alive[key] = weakref.ref(storage, lambda _: self._free(key)), life
        self.lives.append(life)

    def is_for(self, tensor: torch.Tensor, use: Use) -> None:
        """Note what a storage that is counted already turns out to be for."""
        if (alive := self._alive.get(tensor.untyped_storage()._cdata)) is not None:
            alive[1].use = use

    def never_was(self, tensor: torch.Tensor) -> None:
        """Forget a storage that turns out not to be there in a real step."""
        if (alive := self._alive.get(tensor.untyped_storage()._cdata)) is not None:
            alive[1].num_bytes = 0

    def rest_is_for(self, use: Use, instead_of: Use) -> None:
        """Note what all that is alive turns out to be for."""
        for _, life in self._alive.values():
            if life.use is instead_of:
                life.use = use

    def restart(self) -> None:
        """Begin a step: what is alive was there before its first operator, what is not is forgotten."""
        self.now = 0
        self.lives = [life for _, life in self._alive.values()]
        for life in self.lives:
            life.made_at = 0

    def _free(self, key: int) -> None:
        self._alive.pop(key)[1].freed_at = self.now
