"""Let the results that a region keeps stand for the functions that its replay calls.

What a kept function saves is made anew from its operands.
"""

from typing import Any, Protocol

import torch

from memopt.ir import Family, OpPolicy
from memopt.operands import Source, operands_of
from memopt.runtime.replay.filling import Filling
from memopt.runtime.replay.functions import ExpensiveFunctions
from memopt.runtime.replay.places import Function
from memopt.runtime.replay.results import Result


class Standins(Protocol):
    """The results of one forward call."""

    policy: OpPolicy
    fqn: str

    def result_of(self, number: int, func: Function, position: int) -> Result | None:
        """Return what stands for a call of the replay, by its number and how many saves were made before it."""

    def fits(self, result: Result, operands: list[torch.Tensor], args: Any, kwargs: Any) -> bool:
        """Tell whether it may stand for a call with these arguments."""


class Standing(ExpensiveFunctions):
    """Let kept results stand for the functions that a replay calls."""

    def __init__(self, results: Standins, filling: Filling) -> None:
        super().__init__(results.policy, results.fqn)
        self._results = results
        self._filling = filling
        self._number = 0

    def _call(self, func: Function, family: Family, args: Any, kwargs: Any) -> Any:
        """Return a kept result, or call the function."""
        result = self._results.result_of(self._number, func, self._filling.position)
        self._number += 1
        if result is None or not result.is_valid() or (result.saves and not self._would_save()):
            return func(*args, **kwargs)
        operands = operands_of(args, kwargs)
        if operands is None or not self._results.fits(result, operands, args, kwargs):
            return func(*args, **kwargs)
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
