"""What a rewritten module carries in its instance dict: values and a reference to its neighbor, nothing that runs."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memopt.ir import OFFLOAD, Action
from memopt.ir.offload import Offload
from memopt.ir.regions import FUSED_GROUP_MLP, FUSED_PARTS, METHODS, MODULE

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
    parts: tuple[tuple[str, Action], ...] = ()
    """The named regions in it with what they do; then `policy` says nothing about them. Empty for a whole module."""
    offload: Offload | None = None
    """The settings under which parts are swapped."""
    is_last: bool = False
    """Whether it is the last of the prefetch chain: then all shapes of a forward are known."""
    gives_recipes: bool = False
    """Whether who saves an output of it is to save a recipe instead: what it needs of the output is made again too."""

    def __str__(self) -> str:
        if self.parts:
            return ", ".join(f"{name} {action}" for name, action in self.parts)
        return f"{getattr(self.policy, '__name__', self.policy)} {self.action}"

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods of the module that are recomputed beside its forward."""
        recomputed = (name for name, action in self.parts if action is Action.RECOMPUTE)
        return tuple(METHODS[name] for name in recomputed)

    @property
    def collects(self) -> bool:
        """Whether the module's saves go through a group of parts: to be swapped by name, or saved as recipes."""
        return self.policy == OFFLOAD

    @property
    def has_forward(self) -> bool:
        """Whether the module's forward is a region, and not only methods of it."""
        return self.collects or not self.parts

    @property
    def swapped(self) -> frozenset[str]:
        """The names of the parts that are swapped."""
        return frozenset(name for name, action in self.parts if action is Action.SWAP)

    @property
    def offloadable(self) -> tuple[str, ...]:
        """The names of the parts that are swapped, or could be."""
        return tuple(name for name, action in self.parts if action is not Action.RECOMPUTE)

    def part_of(self, name: str) -> str:
        """Return the part that a region's name belongs to, empty if nothing is decided on it."""
        if name in FUSED_PARTS and FUSED_GROUP_MLP in self.offloadable:
            return FUSED_GROUP_MLP
        return name if name in self.offloadable else ""

    @property
    def claimed(self) -> tuple[str, ...]:
        """The paths of the modules in it that are regions themselves."""
        return tuple(name.removeprefix(MODULE) for name in self.offloadable if name.startswith(MODULE))


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


@functools.cache
def method_region(region: Region, name: str) -> Region:
    """Return the region that a method of a region's module is."""
    part = next(part for part, method in METHODS.items() if method == name)
    return Region(f"{region.fqn}:{part}", Action.RECOMPUTE, "full", gives_recipes=True)


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
