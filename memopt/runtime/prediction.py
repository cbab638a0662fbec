"""Whether this thread predicts: fake tensors then go the ways of real ones."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _Thread(threading.local):
    engine: Any = None
    num_draws = 0


_thread = _Thread()


def predicts() -> bool:
    """Tell whether what runs in this thread is a prediction."""
    return _thread.engine is not None


def predicted_engine() -> Any:
    """Return the engine of the prediction that runs in this thread, None if none does."""
    return _thread.engine


@contextmanager
def predicting(engine: Any) -> Iterator[None]:
    """Let regions see to fake tensors as they do to real ones; what they swap goes through an engine."""
    before = _thread.engine, _thread.num_draws
    _thread.engine = engine
    try:
        yield
    finally:
        _thread.engine, _thread.num_draws = before


def draws() -> int:
    """Return how often the prediction of this thread drew random numbers: what stands for its generators' states."""
    return _thread.num_draws


def set_draws(num_draws: int) -> None:
    """Set how often it did."""
    _thread.num_draws = num_draws


def alike(one: Any, other: Any) -> bool:
    """Tell whether two tensors hold the same values; in a prediction, which has none, they do."""
    if isinstance(one, int):  # a number of draws
        return bool(one == other)
    return predicts() or torch.equal(one, other)
