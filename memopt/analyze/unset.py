"""Know a tensor that is made unset once all of its elements are written: lengths and offsets are put together so."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

_PARTLY = "_memopt_partly"
_UNSET = frozenset({"empty", "new_empty", "empty_like"})
MAX_UNSET = 1 << 20


def note_unset(name: str, made: list[torch.Tensor]) -> None:
    """Note what a function of this name makes unset, if it holds whole numbers or masks and is small."""
    if name not in _UNSET:
        return
    for fake in made:
        if fake.numel() <= MAX_UNSET and not fake.is_floating_point() and not fake.is_complex():
            with unset_fake_temporarily():
                setattr(fake, _PARTLY, (torch.zeros(fake.shape, dtype=fake.dtype), torch.zeros(fake.shape).bool()))


def is_partly_set(operand: Any) -> bool:
    """Tell whether a tensor was made unset and nothing but elements of it were written since."""
    return hasattr(operand, _PARTLY)


def write_known(fake: torch.Tensor, index: Any, value: Any) -> torch.Tensor | None:
    """Write known values at a known index of a tensor that was made unset; return its value if that was the last."""
    values, is_set = getattr(fake, _PARTLY)
    with unset_fake_temporarily():
        values[index] = value
        is_set[index] = True
        if not is_set.all():
            return None
    forget_unset(fake)
    return values  # type: ignore[no-any-return]


def forget_unset(tensor: Any) -> None:
    """Forget what was written to a tensor: it is used otherwise, by a view or a write that is not followed."""
    if hasattr(tensor, _PARTLY):
        delattr(tensor, _PARTLY)
