"""Keep the results of expensive functions, so that a replay need not call them.

Both modes work on the functions that Python calls, not on the operators behind them: a call costs two microseconds,
and a replay does without the whole function. What a kept function saves is made anew from its operands.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memopt.operands import Source, operands_of
from memopt.operations import FINDERS, cheap, draws, family_of
from memopt.runtime.contract import refuse_compile
from memopt.runtime.replay.frame import Filling, Frame, Handle
from memopt.runtime.replay.results import Function, Result, Results, result_of_call


class Keeping(TorchFunctionMode):
    """Keep results while a region's forward runs."""

    def __init__(self, results: Results, frame: Frame, drop: Callable[[torch.Tensor], Handle]) -> None:
        super().__init__()
        self._results = results
        self._frame = frame
        self._drop = drop
        self._gate: list[tuple[int, torch.Tensor]] | None = None
        """What is saved inside an expensive function, while one runs."""

    def pack(self, tensor: torch.Tensor) -> Handle:
        """Drop one saved tensor, or keep it: the hook that autograd calls in the region's forward."""
        handle = self._drop(tensor)
        if self._gate is not None:
            self._gate.append((handle.position, tensor))
        else:
            self._results.note(self._frame, handle.position, tensor)
        return handle

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function; keep what the policy names."""
        if FINDERS.get(func) is cheap:
            return func(*args, **kwargs) if kwargs else func(*args)
        if torch.compiler.is_compiling():  # a function inside the region: dynamo would take this mode into its graph
            refuse_compile(self._results.fqn)
        kwargs = kwargs or {}
        family = family_of(func, args, kwargs)
        if family is None or family not in self._results.policy:
            return func(*args, **kwargs)
        result = None
        try:
            if self._results.wants(family) and not draws(func, args, kwargs):
                output, result = self._call(func, args, kwargs)
            else:
                output = func(*args, **kwargs)
            return output
        finally:  # a call that fails and is caught counts as well: the replay makes it too
            self._results.add(self._frame, func, result)

    def _call(self, func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Result | None]:
        operands = operands_of(args, kwargs)
        if operands is None or self._gate is not None:
            return func(*args, **kwargs), None
        gate: list[tuple[int, torch.Tensor]] = []
        self._gate = gate
        try:
            output = func(*args, **kwargs)
        finally:
            self._gate = None
        return output, result_of_call(output, operands, gate, self._frame)


class Standing(TorchFunctionMode):
    """Let kept results stand for the functions that a replay calls."""

    def __init__(self, results: Results, filling: Filling) -> None:
        super().__init__()
        self._results = results
        self._filling = filling
        self._number = 0

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return a kept result, or call the function."""
        if FINDERS.get(func) is cheap:
            return func(*args, **kwargs) if kwargs else func(*args)
        if torch.compiler.is_compiling():  # a function inside the region: dynamo would take this mode into its graph
            refuse_compile(self._results.fqn)
        kwargs = kwargs or {}
        family = family_of(func, args, kwargs)
        if family is None or family not in self._results.policy:
            return func(*args, **kwargs)
        result = self._results.result_of(self._number, func)
        self._number += 1
        if result is None or not result.is_valid():
            return func(*args, **kwargs)
        operands = operands_of(args, kwargs)
        if not result.fits(operands):
            return func(*args, **kwargs)
        assert operands is not None
        self._save(result, operands)
        return result.again()

    def _save(self, result: Result, operands: list[torch.Tensor]) -> None:
        """Save what the function saves."""
        with torch.no_grad():
            for save in result.saves:
                if isinstance(save, Source):
                    self._filling.pack(save.view_of(operands))
                else:
                    self._filling.skip()
        self._filling.end_if_filled()
