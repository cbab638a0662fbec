"""A selective call that keeps what an earlier one of its kind kept, and watches no function for that.

What is kept may stand for a call of the replay only if it is proven to be what that call made in the forward. The replay
does what the forward did; so when it comes to a call with as many saves behind it as the recipe says, the forward made
that call there too, with the same function on arguments that look the same, and its saves had the positions that follow.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memopt.ir import OpPolicy
from memopt.operands import looks_of_call
from memopt.runtime.replay.captures import capturing
from memopt.runtime.replay.frame import Frame, Handle
from memopt.runtime.replay.places import Function
from memopt.runtime.replay.recipes import Ingredient, Recipe, Shelf
from memopt.runtime.replay.results import Held, Result, storages_of
from memopt.runtime.replay.watch import Ended

_Versioned = tuple[torch.Tensor, int]


class Recalled:
    """What one call kept by a recipe."""

    def __init__(self, policy: OpPolicy, fqn: str) -> None:
        self.policy = policy
        self.fqn = fqn
        self._results: dict[int, Result] = {}

    def put(self, result: Result) -> None:
        """Keep the result of a call, by the number of saves before it."""
        self._results[result.call.begin] = result

    def result_of(self, number: int, func: Function, position: int) -> Result | None:
        """Return what stands for a call of the replay, None where it is not the one of the recipe."""
        result = self._results.get(position)
        return result if result is not None and (result.call.number, result.call.func) == (number, func) else None

    def fits(self, result: Result, operands: list[torch.Tensor], args: Any, kwargs: Any) -> bool:
        """Tell whether a call of the replay looks like the one of the recipe."""
        return looks_of_call(operands, args, kwargs) == result.call.looks


class Following:
    """Keep results while a region's forward runs, where a recipe says they turn up."""

    def __init__(self, recipe: Recipe, policy: OpPolicy, frame: Frame, shelf: Shelf) -> None:
        self._recipe = recipe
        self._frame = frame
        self._shelf = shelf
        self._saved: dict[int, _Versioned] = {}
        self._outputs: dict[int, _Versioned] = {}
        self._recalled = Recalled(policy, frame.fqn)

    def pack(self, tensor: torch.Tensor) -> Handle:
        """Drop one saved tensor, or keep it: the hook that autograd calls in the region's forward."""
        handle = self._frame.pack(tensor)
        if handle.position in self._recipe.positions:
            self._take(handle.position, tensor)
        return handle

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
        recipe, looks = self._recipe, self._frame.looks()
        is_as_expected = looks == recipe.looks and len(self._outputs) == sum(map(len, recipe.found.values()))
        if not is_as_expected:
            self._shelf.forget()
        num_alike = len(looks) if looks == recipe.looks else _num_alike(looks, recipe.looks)
        results = {n: self._result(n, one) for n, one in enumerate(recipe.ingredients) if self._has(n, one, num_alike)}
        for result in filter(Result.is_valid, results.values()):
            self._recalled.put(result)
            for position in result.held():
                self._frame.keep(position, self._saved[position][0], result)
        if not is_as_expected:
            kept = storages_of(tensor for result in results.values() for tensor, _ in result.versions)
            return Ended(len(looks), self._recalled, sum(kept.values()))
        for position, number in recipe.tail.items():
            tensor, version = self._saved[position]
            self._frame.keep(position, tensor, Held(tensor, version, None if number is None else results[number]))
        return Ended(recipe.num_needed, self._recalled, recipe.num_bytes)

    def _has(self, number: int, one: Ingredient, num_alike: int) -> bool:
        """Tell whether a result turned up, with all saves before it as they should be."""
        return one.call.end <= num_alike and (one.own is not None or number in self._outputs)

    def _result(self, number: int, one: Ingredient) -> Result:
        own = tuple(self._saved[save] for save in one.saves if isinstance(save, int))
        found, version = self._outputs[number] if one.own is None else self._saved[one.own]
        output = one.output_in(found)
        return Result(one.call, output, one.need_grad, one.saves, ((output, version), *own))


def _num_alike(looks: list[int], others: list[int]) -> int:
    pairs = enumerate(zip(looks, others, strict=False))
    return next((n for n, (one, other) in pairs if one != other), min(len(looks), len(others)))
