"""Know from an earlier call of a region which results it keeps, and where in the forward they turn up.

A function mode finds them, but costs every function that Python calls two microseconds, and a forward that is bound by
the host pays for that. In later calls of the same kind they are taken from two places instead: from among the saves of
the region, by position, and from what the modules inside return.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from memopt.operands import PLAIN, Source
from memopt.runtime.replay.captures import watch_output
from memopt.runtime.replay.frame import Frame
from memopt.runtime.replay.places import Call, Geometry, Place, geometry_of
from memopt.runtime.replay.results import Result, Results
from memopt.tensors import storage_key

_MAX_RECIPES = 16
"""So many kinds of calls of a region are remembered."""
_MAX_FAILURES = 4
"""After so many calls that did not teach anything, or were not as the recipe says, functions are always watched."""


@dataclass(frozen=True, slots=True)
class Ingredient:
    """One result that is kept: the output of a function, which is one tensor."""

    call: Call
    saves: tuple[Source | int, ...]
    need_grad: tuple[bool, ...]
    geometry: Geometry
    version: int
    """How often the output was written to when the function returned it."""
    own: int | None
    """The position of a save of the function itself on whose storage the output lies."""
    place: Place | None
    """Where it is found otherwise."""

    @property
    def held(self) -> list[int]:
        """The positions of what the function saved itself, and the frame holds."""
        return [save for save in self.saves if isinstance(save, int)]

    def is_in(self, tensor: torch.Tensor, frame: Frame) -> bool:
        """Tell whether a tensor that was found in its place is it, or a view of it, and nobody has written to it."""
        if self.place is None or type(tensor) not in PLAIN or tensor.layout is not torch.strided:
            return False
        if geometry_of(tensor) != self.place.geometry:
            return False
        return self.call.returned(tensor, frame) and tensor._version == self.version

    def output_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the output out of another tensor on its storage."""
        shape, stride, offset, _ = self.geometry
        return tensor.as_strided(shape, stride, offset)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a call of a region keeps."""

    looks: list[int]
    """Of all its saves."""
    ingredients: tuple[Ingredient, ...]
    tail: dict[int, int | None]
    """The last saves, which are kept too: the position, and the ingredient that one lies on."""
    num_needed: int
    """How many saves there are before the tail."""
    num_bytes: int
    positions: frozenset[int] = field(init=False)
    """Of the saves that are looked at."""
    found: dict[tuple[int, int | None], list[int]] = field(init=False)
    """The ingredients to be found in a place: by position and module."""
    num_found: int = field(init=False)
    begins: dict[int, int] = field(init=False)
    """Which ingredient's call begins with so many saves behind it."""

    def __post_init__(self) -> None:
        """Index the ingredients."""
        held = [position for one in self.ingredients for position in one.held]
        found: dict[tuple[int, int | None], list[int]] = {}
        for number, one in enumerate(self.ingredients):
            if one.place is not None:
                found.setdefault((one.place.position, one.place.module), []).append(number)
        saved = (position for position, module in found if module is None)
        object.__setattr__(self, "positions", frozenset((*held, *self.tail, *saved)))
        object.__setattr__(self, "found", found)
        object.__setattr__(self, "num_found", sum(map(len, found.values())))
        object.__setattr__(self, "begins", {one.call.begin: number for number, one in enumerate(self.ingredients)})


class Recipes:
    """The recipes of a region, by kind of call: what its arguments and surroundings look like."""

    def __init__(self) -> None:
        self._recipes: dict[Hashable, Recipe] = {}
        self._failures = 0

    def find(self, kind: Hashable) -> Recipe | None:
        """Return what is known of a kind of call."""
        return self._recipes.get(kind)

    def learn(self, kind: Hashable, results: Results, frame: Frame, modules: Iterable[nn.Module]) -> None:
        """Write down what a call kept; where a module has to show its output for that, watch it from now on."""
        if self._failures >= _MAX_FAILURES:
            return
        kept = [result for _, result in results.calls if result is not None]
        ingredients = [_ingredient(result) for result in kept]
        if None in ingredients:
            missing = [result for result, one in zip(kept, ingredients, strict=True) if one is None]
            self._failures += 1 if _watch(modules, missing) else _MAX_FAILURES
            return
        while len(self._recipes) >= _MAX_RECIPES:
            del self._recipes[next(iter(self._recipes))]
        self._recipes[kind] = Recipe(
            looks=frame.looks(),
            ingredients=tuple(one for one in ingredients if one is not None),
            tail=results.tail(frame, kept),
            num_needed=results.num_needed,
            num_bytes=results.num_bytes(frame),
        )

    def forget(self, kind: Hashable) -> None:
        """Give up a recipe after a call that was another one."""
        self._recipes.pop(kind, None)
        self._failures += 1


class Shelf:
    """The place of one call's recipe."""

    def __init__(self, recipes: Recipes, kind: Hashable, modules: Iterable[nn.Module]) -> None:
        self._recipes = recipes
        self._kind = kind
        self._modules = modules
        self.recipe = recipes.find(kind)

    def learn(self, results: Results, frame: Frame) -> None:
        """Put down what the call kept."""
        self._recipes.learn(self._kind, results, frame, self._modules)

    def forget(self) -> None:
        """Take the recipe away: the call was another one."""
        self._recipes.forget(self._kind)

    def close(self) -> None:
        """Let go of the modules: autograd holds whoever packs for as long as the graph, and they may hold its output."""
        self._modules = ()


def _ingredient(result: Result) -> Ingredient | None:
    output, call = result.outputs, result.call
    if not isinstance(output, torch.Tensor) or call.begin == call.end:
        return None
    saved = zip(result.held(), result.versions[1:], strict=True) if result.returns_own else ()
    own = next((position for position, (t, _) in saved if storage_key(t) == storage_key(output)), None)
    if own is None and result.place is None:
        return None
    place = result.place if own is None else None
    version = result.versions[0][1]
    return Ingredient(call, result.saves, result.need_grad, geometry_of(output), version, own, place)


def _watch(modules: Iterable[nn.Module], results: list[Result]) -> bool:
    """Watch the modules whose parameters the calls of some results use; return whether that is new of any."""
    owners = {id(p): module for module in modules for p in module._parameters.values() if p is not None}
    users = [next((owners[p] for p in result.parameters if p in owners), None) for result in results]
    if any(user is None for user in users):
        return False
    return any([watch_output(user) for user in users if user is not None])
