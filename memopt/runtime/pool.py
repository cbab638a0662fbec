"""Host memory for swapped storages: large slabs, cut to size, under one byte cap."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch

ALIGNMENT_BYTES = 512
SLAB_BYTES = 256 << 20
"""A power of two: the pinned allocator rounds every request up to one, so a slab wastes nothing."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a slab; `memory` is a flat uint8 tensor of exactly the bytes asked for."""

    memory: torch.Tensor
    slab: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class PoolStats:
    """What was asked of a pool of host memory since its counters were reset, and what it holds."""

    num_hits: int
    """Requests met by a block of the same size that had come back."""
    num_misses: int
    """Requests for which a block was cut anew, or which the cap refused."""
    held_bytes: int
    """Of all slabs; they stay for the next step."""
    in_use_bytes: int
    peak_bytes: int
    """The most that was in use at once."""


class HostPool:
    """Hand out and take back blocks of host memory. Not thread-safe: its engine holds the lock.

    A block that comes back waits whole for the next request of its size, as the next step makes the same requests;
    only when a size is missing are the waiting blocks joined with the gaps beside them.
    """

    def __init__(
        self, allocate: Callable[[int], torch.Tensor], *, cap_bytes: int, slab_bytes: int = SLAB_BYTES
    ) -> None:
        self._allocate = allocate
        self._slab_bytes = slab_bytes
        self._waiting: dict[int, list[Block]] = {}
        self._slabs: list[torch.Tensor] = []
        self._gaps: list[list[tuple[int, int]]] = []
        """Per slab, its free (start, size) pieces by start."""
        self.cap_bytes = cap_bytes
        self.held_bytes = 0
        self.in_use_bytes = 0
        self.peak_bytes = 0
        self.num_hits = 0
        self.num_misses = 0

    def take(self, num_bytes: int) -> Block | None:
        """Return a block, or None if the cap does not allow it."""
        waiting = self._waiting.get(num_bytes)
        self.num_hits += bool(waiting)
        self.num_misses += not waiting
        block = waiting.pop() if waiting else self._cut(num_bytes)
        if block is not None:
            self.in_use_bytes += block.size
            self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)
        return block

    def stats(self) -> "PoolStats":
        """Return what was asked of the pool, and what it holds."""
        return PoolStats(self.num_hits, self.num_misses, self.held_bytes, self.in_use_bytes, self.peak_bytes)

    def reset_stats(self) -> None:
        """Count from now on; the peak starts at what is in use."""
        self.num_hits = self.num_misses = 0
        self.peak_bytes = self.in_use_bytes

    def has(self, num_bytes: int) -> bool:
        """Tell whether a block can be had without new memory."""
        return bool(self._waiting.get(num_bytes)) or self._find(_aligned(num_bytes))[0] >= 0

    def give(self, block: Block) -> None:
        """Take a block back."""
        self._waiting.setdefault(len(block.memory), []).append(block)
        self.in_use_bytes -= block.size

    def _cut(self, num_bytes: int) -> Block | None:
        size = _aligned(num_bytes)
        slab, gap = self._find(size)
        if slab < 0 and self._waiting:
            self._join_waiting()
            slab, gap = self._find(size)
        if slab < 0:
            if not self._grow(size):
                return None
            slab, gap = len(self._slabs) - 1, 0
        start, length = self._gaps[slab][gap]
        self._gaps[slab][gap : gap + 1] = [(start + size, length - size)] if length > size else []
        return Block(self._slabs[slab][start : start + num_bytes], slab, start, size)

    def _join_waiting(self) -> None:
        for blocks in self._waiting.values():
            for block in blocks:
                self._join(block)
        self._waiting.clear()

    def _join(self, block: Block) -> None:
        """Make a block a gap again, one with the gaps beside it."""
        gaps = self._gaps[block.slab]
        start, size = block.start, block.size
        at = bisect_left(gaps, (start, 0))
        if at < len(gaps) and gaps[at][0] == start + size:
            size += gaps.pop(at)[1]
        if at > 0 and sum(gaps[at - 1]) == start:
            at -= 1
            start, size = gaps[at][0], size + gaps.pop(at)[1]
        gaps.insert(at, (start, size))

    def _find(self, size: int) -> tuple[int, int]:
        for slab, gaps in enumerate(self._gaps):
            for at, (_, length) in enumerate(gaps):
                if length >= size:
                    return slab, at
        return -1, -1

    def _grow(self, size: int) -> bool:
        num_bytes = max(self._slab_bytes, 1 << (size - 1).bit_length())
        if self.held_bytes + num_bytes > self.cap_bytes:
            num_bytes = size
        if self.held_bytes + num_bytes > self.cap_bytes:
            return False
        try:
            self._slabs.append(self._allocate(num_bytes))
        except RuntimeError:  # the host has less than the cap promised
            return False
        self._gaps.append([(0, num_bytes)])
        self.held_bytes += num_bytes
        return True


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
