"""Let the results that a region keeps stand for the functions that its replay calls.

What a kept function saves is made anew from its operands.
"""

from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from memopt.ir import OpPolicy
from memopt.operands import Source, operands_of
from memopt.operations import FINDERS, cheap, family_of
from memopt.runtime.contract import refuse_compile
from memopt.runtime.replay.frame import Filling
from memopt.runtime.replay.places import Function
from memopt.runtime.replay.results import Result


class Standins(Protocol):
    """The results of one forward call."""

    policy: OpPolicy
    fqn: str

    def result_of(self, number: int, func: Function, position: int, args: Any, kwargs: Any) -> Result | None:
        """Return what stands for a call of the replay, by its number and how many saves were made before it."""


class Standing(TorchFunctionMode):
    """Let kept results stand for the functions that a replay calls."""

    def __init__(self, results: Standins, filling: Filling) -> None:
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
        result = self._results.result_of(self._number, func, self._filling.position, args, kwargs)
        self._number += 1
        if result is None or not result.is_valid() or (result.saves and not self._would_save()):
            return func(*args, **kwargs)
        operands = operands_of(args, kwargs)
        if not result.fits(operands):
            return func(*args, **kwargs)
        assert operands is not None
        self._save(result, operands)
        return result.again()

    def _would_save(self) -> bool:
        """Tell whether a function saves here, and to the filling: not without grad, nor inside hooks of the user."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return torch.is_grad_enabled() and hooks is not None and hooks[0] == self._filling.pack

    def _save(self, result: Result, operands: list[torch.Tensor]) -> None:
        """Save what the function saves."""
        with torch.no_grad():
            for save in result.saves:
                if isinstance(save, Source):
                    self._filling.pack(save.view_of(operands))
                else:
                    self._filling.skip()
        self._filling.end_if_filled()
