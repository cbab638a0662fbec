"""The random numbers that a trace draws are nobody's: what the program draws next is what it would have drawn."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def random_streams_kept() -> Iterator[None]:
    """Put the global generators of torch's CPU, Python and numpy back to where they were."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy and numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
