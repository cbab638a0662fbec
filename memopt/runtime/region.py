"""What a rewritten module carries in its instance dict: values and a reference to its neighbor, nothing that runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memopt.ir import Action

REGION = "_memopt_region"
"""The attribute of a rewritten module's Region."""
PREVIOUS = "_memopt_previous"
"""The attribute of the Neighbor before it in the prefetch chain."""
HABITS = "_memopt_habits"
"""The attribute of a checkpointed module's Habits."""


@dataclass(frozen=True, slots=True)
class Region:
    """What a rewritten module is to do; a value, so that it can be compared, copied and pickled with the module."""

    fqn: str
    action: Action
    policy: "str | Callable[[torch.Tensor], Any]"
    """A name that a decision gives, or the user's function."""
    group_swap: bool = True
    """Bring a whole group back when backward reaches it, and the one before it; else each tensor when it is needed."""
    compiles: bool = False
    """Whether torch.compile may have the module."""

    def __str__(self) -> str:
        return f"{getattr(self.policy, '__name__', self.policy)} {self.action}"


class Habits:
    """What a module was seen to do in its calls; a copy of the module begins without."""

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Habits":
        return Habits()

    def __reduce__(self) -> tuple[Any, ...]:
        return Habits, ()


class Neighbor:
    """A reference to another module that follows a deep copy of the model, but makes no copy of its own."""

    __slots__ = ("module",)

    def __init__(self, module: nn.Module | None) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> "Neighbor":
        return Neighbor(memo.get(id(self.module)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Neighbor, (self.module,)


def region_of(module: nn.Module) -> Region | None:
    """Return what a module was rewritten to do, or None."""
    return module.__dict__.get(REGION)


def habits_of(module: nn.Module) -> Habits:
    """Return what a module was seen to do."""
    habits: Habits = module.__dict__.setdefault(HABITS, Habits())
    return habits


def previous_of(module: nn.Module) -> nn.Module | None:
    """Return the module before it in the prefetch chain, or None."""
    neighbor: Neighbor | None = module.__dict__.get(PREVIOUS)
    return neighbor.module if neighbor else None


def set_previous(module: nn.Module, previous: nn.Module | None) -> None:
    """Put a module behind another in the prefetch chain."""
    module.__dict__[PREVIOUS] = Neighbor(previous)
