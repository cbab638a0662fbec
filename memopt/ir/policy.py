"""What each saved tensor should do, as arithmetic on plain numbers: passes predict with it, the runtime obeys it."""

import enum
from collections.abc import Callable
from types import MappingProxyType

MIN_SWAP_TENSOR_BYTES = 1 << 20
"""Below this a saved tensor stays on the device; exactly this is swapped (the RFC's constant)."""


class CheckpointPolicy(enum.Enum):
    """Say what to do with one saved tensor: torch's names and values, and MUST_SWAP.

    torch's own enum has members and so cannot be extended. A policy function may return torch's members as well:
    MUST_CPU_OFFLOAD there means MUST_SWAP here.
    """

    MUST_SAVE = 0
    PREFER_SAVE = 1
    MUST_RECOMPUTE = 2
    PREFER_RECOMPUTE = 3
    MUST_CPU_OFFLOAD = 4
    PREFER_CPU_OFFLOAD = 5
    MUST_SWAP = 6


class Keep(enum.StrEnum):
    """Why a saved tensor stays on the device; the value is what the report prints."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    PARAMETER_CAST = "parameter cast"
    NO_GRAD = "needs no grad"
    FEW_DIMS = "under 2 dims"
    PARTIAL = "view of part of a storage"
    SMALL = "under 1 MiB"
    MARGIN = "margin"


def attention_keep_reason(*, requires_grad: bool, num_dims: int, tensor_bytes: int, storage_bytes: int) -> Keep | None:
    """Return why attention swap keeps a tensor, or None if it swaps it (RFC section 6.2)."""
    if not requires_grad:
        return Keep.NO_GRAD
    if num_dims < 2:
        return Keep.FEW_DIMS
    if storage_bytes != tensor_bytes:
        return Keep.PARTIAL
    if tensor_bytes < MIN_SWAP_TENSOR_BYTES:
        return Keep.SMALL
    return None


POLICIES: MappingProxyType[str, Callable[..., Keep | None]] = MappingProxyType({"attention": attention_keep_reason})
"""The tensor policies that a decision can name."""
