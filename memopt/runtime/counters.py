"""What the engine did for one module, for proofs and reports."""

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(slots=True)
class Counters:
    """Cumulative counts: of storages and their bytes, and of the calls of checkpointed regions."""

    registered_tensors: int = 0
    registered_bytes: int = 0
    copied_out_tensors: int = 0
    copied_out_bytes: int = 0
    copied_in_tensors: int = 0
    copied_in_bytes: int = 0
    checkpointed_calls: int = 0
    replayed_calls: int = 0
    kept_results_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """The counters of all rewritten modules of a model, summed; calls that torch.compile runs are not counted."""

    registered_tensors: int
    registered_bytes: int
    copied_out_tensors: int
    copied_out_bytes: int
    copied_in_tensors: int
    copied_in_bytes: int
    checkpointed_calls: int
    """Of regions that dropped what they save."""
    replayed_calls: int
    kept_results_bytes: int
    """Of expensive functions, kept so that a replay need not call them."""


def summed(counters: Iterable[Counters]) -> Stats:
    """Add up counters, field by field."""
    counters = tuple(counters)
    return Stats(*(sum(getattr(c, f.name) for c in counters) for f in fields(Counters)))
