"""A selective call that keeps what an earlier one of its kind kept, and watches no function for that.

What is kept may stand for a call of the replay only if it is proven to be what that call made in the forward. The replay
does what the forward did; so when it comes to a call with as many saves behind it as the recipe says, the forward made
that call there too, with the same function on arguments that look the same, and its saves had the positions that follow.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from memopt.ir import OpPolicy
from memopt.operands import looks_of_call
from memopt.runtime.replay.captures import capturing
from memopt.runtime.replay.frame import Frame, Handle
from memopt.runtime.replay.places import Function
from memopt.runtime.replay.recipes import Recipe, Shelf
from memopt.runtime.replay.results import Result, storages_of
from memopt.runtime.replay.watch import Ended

_Versioned = tuple[torch.Tensor, int]


class Recalled:
    """What one call kept by a recipe. A result is put together when the replay asks for it: the host has time then."""

    def __init__(self, recipe: Recipe, policy: OpPolicy, fqn: str, num_alike: int) -> None:
        self.policy = policy
        self.fqn = fqn
        self.saved: dict[int, _Versioned] = {}
        """What the functions saved themselves, by position."""
        self.outputs: dict[int, _Versioned] = {}
        """What was found in another place, by ingredient."""
        self._recipe = recipe
        self._num_alike = num_alike
        self._results: dict[int, Result] = {}

    def has(self, number: int) -> bool:
        """Tell whether a result turned up, with all saves before it as they should be."""
        one = self._recipe.ingredients[number]
        return one.call.end <= self._num_alike and (one.own is not None or number in self.outputs)

    def result(self, number: int) -> Result:
        """Return the result that an ingredient stands for."""
        if number not in self._results:
            one = self._recipe.ingredients[number]
            own = tuple(self.saved[position] for position in one.held)
            found, version = self.outputs[number] if one.own is None else self.saved[one.own]
            output = one.output_in(found)
            self._results[number] = Result(one.call, output, one.need_grad, one.saves, ((output, version), *own))
        return self._results[number]

    def result_of(self, number: int, func: Function, position: int) -> Result | None:
        """Return what stands for a call of the replay, None where it is not the one of the recipe."""
        found = self._recipe.begins.get(position)
        if found is None or not self.has(found):
            return None
        call = self._recipe.ingredients[found].call
        return self.result(found) if (call.number, call.func) == (number, func) else None

    def fits(self, result: Result, operands: list[torch.Tensor], args: Any, kwargs: Any) -> bool:
        """Tell whether a call of the replay looks like the one of the recipe."""
        return looks_of_call(operands, args, kwargs) == result.call.looks


class _Own(NamedTuple):
    """The guard of what a kept function saved itself."""

    recalled: Recalled
    number: int

    def is_valid(self) -> bool:
        """Tell whether nobody has written to the result since."""
        return self.recalled.result(self.number).is_valid()


class _Tail(NamedTuple):
    """The guard of a save after all that the replay computes."""

    tensor: torch.Tensor
    version: int
    recalled: Recalled
    number: int | None
    """The result that it lies on."""

    def is_valid(self) -> bool:
        """Tell whether nobody has written to it since."""
        if self.tensor._version != self.version:
            return False
        return self.number is None or self.recalled.result(self.number).is_valid()


class Following:
    """Keep results while a region's forward runs, where a recipe says they turn up."""

    def __init__(self, recipe: Recipe, policy: OpPolicy, frame: Frame, shelf: Shelf) -> None:
        self._recipe = recipe
        self._positions = recipe.positions
        self._policy = policy
        self._frame = frame
        self._looks = frame.looks()
        self._shelf = shelf
        self._saved: dict[int, _Versioned] = {}
        self._outputs: dict[int, _Versioned] = {}

    def pack(self, tensor: torch.Tensor) -> Handle:
        """Drop one saved tensor, or keep it: the hook that autograd calls in the region's forward."""
        position = len(self._looks)
        self._looks.append(hash((tensor.shape, tensor.dtype)))  # as the frame's own does
        if position in self._positions:
            self._take(position, tensor)
        return Handle(self._frame, position)

    def _take(self, position: int, tensor: torch.Tensor) -> None:
        for number in self._recipe.found.get((position, None), ()):
            self._find(number, tensor)
        self._saved[position] = tensor.detach(), tensor._version

    def capture(self, module: nn.Module, output: Any) -> None:
        """Look for results in what a module returns."""
        for number in self._recipe.found.get((self._frame.num_saves, id(module)), ()):
            place = self._recipe.ingredients[number].place
            leaf = place.leaf_of(output) if place is not None else None
            if isinstance(leaf, torch.Tensor):
                self._find(number, leaf)

    def _find(self, number: int, tensor: torch.Tensor) -> None:
        if self._recipe.ingredients[number].is_in(tensor, self._frame):
            self._outputs[number] = tensor.detach(), tensor._version

    @contextmanager
    def active(self) -> Iterator[None]:
        """Take what the modules return that this thread calls."""
        with capturing(self.capture):
            yield

    def close(self) -> Ended:
        """Keep what the recipe says; if this was another kind of call after all, only what came before the difference."""
        self._shelf.close()
        recipe, looks, frame = self._recipe, self._looks, self._frame
        num_alike = len(looks) if looks == recipe.looks else _num_alike(looks, recipe.looks)
        recalled = Recalled(recipe, self._policy, frame.fqn, num_alike)
        recalled.outputs = self._outputs
        kept = [number for number in range(len(recipe.ingredients)) if recalled.has(number)]
        for number in kept:
            for position in recipe.ingredients[number].held:
                recalled.saved[position] = self._saved[position]
                frame.keep(position, self._saved[position][0], _Own(recalled, number))
        if looks != recipe.looks or len(self._outputs) != recipe.num_found:
            self._shelf.forget()
            storages = storages_of(tensor for number in kept for tensor, _ in recalled.result(number).versions)
            return Ended(len(looks), recalled, sum(storages.values()))
        for position, on in recipe.tail.items():
            tensor, version = self._saved[position]
            frame.keep(position, tensor, _Tail(tensor, version, recalled, on))
        return Ended(recipe.num_needed, recalled, recipe.num_bytes)


def _num_alike(looks: list[int], others: list[int]) -> int:
    pairs = enumerate(zip(looks, others, strict=False))
    return next((n for n, (one, other) in pairs if one != other), min(len(looks), len(others)))
