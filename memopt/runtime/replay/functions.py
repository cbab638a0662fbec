"""See the expensive functions that Python calls in a forward or its replay.

A mode works on functions, not on the operators behind them: a call costs two microseconds, an operator ten times that.
"""

from typing import Any

from torch import compiler
from torch.overrides import TorchFunctionMode

from memopt.ir import Family, OpPolicy
from memopt.operations import FINDERS, cheap, family_of
from memopt.runtime.contract import refuse_compile
from memopt.runtime.replay.places import Function


class ExpensiveFunctions(TorchFunctionMode):
    """Let a subclass call the functions that a policy names; all others just run."""

    def __init__(self, policy: OpPolicy, fqn: str) -> None:
        super().__init__()
        self._policy = policy
        self._fqn = fqn

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function."""
        if FINDERS.get(func) is cheap:
            return func(*args, **kwargs) if kwargs else func(*args)
        if compiler.is_compiling():  # a function inside the region: dynamo would take this mode into its graph
            refuse_compile(self._fqn)
        kwargs = kwargs or {}
        family = family_of(func, args, kwargs)
        if family is None or family not in self._policy:
            return func(*args, **kwargs)
        return self._call(func, family, args, kwargs)

    def _call(self, func: Function, family: Family, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError
