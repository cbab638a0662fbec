"""What a router chooses depends on data, which a trace has not: it is taken to choose evenly."""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

MAX_CHOICES = 1 << 18
"""Those of 32768 tokens, 8 each; more are seldom a router's: sparse attention chooses keys."""

_DIMS: dict[str, Callable[..., int]] = {
    "topk": lambda input, k, dim=-1, *_, **options: dim,
    "max": lambda input, dim, *_, **options: dim,  # of one expert, or of one after the other
}
"""Functions that choose -> the dimension along which they do, of their arguments."""


def balanced(func: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> Any:
    """Return the values of what a function that picks by data gives: even choices, and None for what is not known.

    None for any other function, and for too many choices.
    """
    dim_of = _DIMS.get(getattr(func, "__name__", ""))
    if dim_of is None or not isinstance(out, tuple):
        return None
    _, chosen = out
    scores = args[0] if args else kwargs["input"]
    if scores.dim() == 0 or chosen.numel() > MAX_CHOICES:
        return None
    return None, _in_turn(chosen, scores, dim_of(*args, **kwargs))


def _in_turn(chosen: torch.Tensor, scores: torch.Tensor, dim: int) -> torch.Tensor:
    """Return indices of the shape of those that were chosen along `dim`: each row goes on where the last one ended."""
    with unset_fake_temporarily():
        turns = torch.arange(chosen.numel()) % scores.shape[dim]
        if chosen.dim() < scores.dim():  # one choice a row
            return turns.view(chosen.shape)
        rows = torch.empty(chosen.shape, device="meta").movedim(dim, -1).shape
        return turns.view(rows).movedim(-1, dim)


def healthy(func: Callable[..., Any], args: Any, kwargs: Any) -> torch.Tensor | None:
    """Return what a function gives whose result has one shape unless the data are faulty; None for any other."""
    return _bincount(*args, **kwargs) if getattr(func, "__name__", "") == "bincount" else None


def _bincount(input: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor | None:
    """Return counts of whole numbers below `minlength`, as routers count their experts; None without one."""
    sums = torch.float32 if weights is not None and weights.dtype is torch.float32 else torch.float64
    return input.new_empty(minlength, dtype=torch.int64 if weights is None else sums) if minlength > 0 else None
