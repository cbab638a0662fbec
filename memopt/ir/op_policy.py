"""Which expensive operations a checkpointed region keeps the results of, instead of computing them twice."""

import enum
from dataclasses import dataclass
from types import MappingProxyType


class Family(enum.StrEnum):
    """An operation that is dear to compute twice, whatever function it is called by."""

    MM = "mm"
    """Also linear without a bias, and matmul with a matrix."""
    GROUPED_MM = "grouped mm"
    ADDMM = "addmm"
    """Also linear with a bias."""
    BMM = "bmm"
    """Also matmul of batches, and einsum."""
    SCALED_MM = "scaled mm"
    CONVOLUTION = "convolution"
    UPSAMPLE = "upsample"
    ATTENTION = "attention"
    COMMUNICATION = "communication"


@dataclass(frozen=True, slots=True)
class OpPolicy:
    """What of a region's results is kept; everything else is recomputed."""

    always: frozenset[Family] = frozenset()
    alternate: frozenset[Family] = frozenset()
    """Of these, counted together in each call of the region, the first, the third and so on."""

    def __contains__(self, family: object) -> bool:
        return family in self.always or family in self.alternate


_MATRICES = frozenset({Family.MM, Family.GROUPED_MM})

OP_POLICIES: MappingProxyType[str, OpPolicy] = MappingProxyType(
    {
        "full": OpPolicy(),
        "selective": OpPolicy(always=frozenset(Family) - _MATRICES, alternate=_MATRICES),
        "attention-only": OpPolicy(always=frozenset({Family.ATTENTION})),
    }
)
"""The policies that a decision to recompute can name (RFC "activation checkpoint"; the last is a preset for code)."""
