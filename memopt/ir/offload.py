"""What fine-grained offload is asked to do, and the rules by which groups stay on the device.

A group is one region of one layer. Source: Megatron-LM's fine-grained activation offloading; the rules come in its order:
margin, pipeline delta, fraction.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

DEFAULT_MIN_ELEMENTS = 1 << 20
"""Megatron's threshold: a count of elements, not of bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """The settings of fine-grained offload that decide anew when shapes change, and those that the engine obeys."""

    min_tensor_elements: int = DEFAULT_MIN_ELEMENTS
    fraction: float = 1.0
    """Of the eligible groups, how many are offloaded; later ones are dropped first."""
    max_inflight: int | None = None
    """How many layers may be on their way out before the computation waits; 0 waits at every layer."""
    pp_rank: int = 0
    pp_rank_delta_bytes: int = 0
    """Rank r keeps the first groups of r times this many bytes on the device."""
    margin: int | Literal["auto"] = "auto"
    """The last groups stay: ``auto``, the last of each region, else the last ones up to this many bytes."""


class Group(NamedTuple):
    """One region of one layer, in the order of the forward."""

    fqn: str
    region: str
    num_bytes: int
    """Of what is eligible in it: 0 for a group that has nothing to offload."""
