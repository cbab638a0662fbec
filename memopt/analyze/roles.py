"""Name each save by the autograd node and field that hold it."""

from memopt.analyze.observation import Observation, Ticket
from memopt.autograd import packed_saves


def name_saves(seen: Observation) -> None:
    """Fill in `node` and `field` of every save that can be reached from the output."""
    for node, field, packed in packed_saves(seen.output):
        if isinstance(packed, Ticket):
            save = seen.saves[packed.index]
            save.node, save.field = node, field
