"""Keep the results of expensive functions in a region's forward, so that a replay need not call them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memopt.ir import Family, OpPolicy
from memopt.operands import looks_of_call, operands_of
from memopt.operations import draws
from memopt.runtime.replay.captures import capturing
from memopt.runtime.replay.frame import Frame, Handle
from memopt.runtime.replay.functions import ExpensiveFunctions
from memopt.runtime.replay.places import Call, Function
from memopt.runtime.replay.recipes import Shelf
from memopt.runtime.replay.results import Result, Results, result_of_call
from memopt.runtime.replay.watch import Ended


class Keeping(ExpensiveFunctions):
    """Keep results while a region's forward runs."""

    def __init__(self, policy: OpPolicy, frame: Frame, shelf: Shelf, drop: Callable[[torch.Tensor], Handle]) -> None:
        super().__init__(policy, frame.fqn)
        self._results = Results(policy, frame)
        self._frame = frame
        self._shelf = shelf
        self._drop = drop
        self._gate: list[tuple[int, torch.Tensor]] | None = None
        """What is saved inside an expensive function, while one runs."""

    def pack(self, tensor: torch.Tensor) -> Handle:
        """Drop one saved tensor, or keep it: the hook that autograd calls in the region's forward."""
        handle = self._drop(tensor)
        self._results.see(self._frame, tensor, handle.position)
        if self._gate is not None:
            self._gate.append((handle.position, tensor))
        else:
            self._results.note(self._frame, handle.position, tensor)
        return handle

    def _call(self, func: Function, family: Family, args: Any, kwargs: Any) -> Any:
        """Call a function that the policy names, and keep its result."""
        result = None
        try:
            if self._results.wants(family) and not draws(func, args, kwargs):
                output, result = self._call_in_gate(func, args, kwargs)
            else:
                output = func(*args, **kwargs)
            return output
        finally:  # a call that fails and is caught counts as well: the replay makes it too
            self._results.add(self._frame, func, result)

    def _call_in_gate(self, func: Function, args: Any, kwargs: Any) -> tuple[Any, Result | None]:
        operands = operands_of(args, kwargs)
        if operands is None or self._gate is not None:
            return func(*args, **kwargs), None
        gate: list[tuple[int, torch.Tensor]] = []
        begin, self._gate = self._frame.num_saves, gate
        try:
            output = func(*args, **kwargs)
        finally:
            self._gate = None
        call = Call(len(self._results.calls), func, begin, self._frame.num_saves, looks_of_call(operands, args, kwargs))
        return output, result_of_call(call, output, operands, gate, self._frame)

    def capture(self, module: nn.Module, output: Any) -> None:
        """Note which results a module returns."""
        for place, leaf in enumerate(output) if isinstance(output, (tuple, list)) else [(None, output)]:
            if isinstance(leaf, torch.Tensor):
                self._results.see(self._frame, leaf, self._frame.num_saves, id(module), place)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Watch the functions and modules that this thread calls."""
        with capturing(self.capture), self:
            yield

    def close(self) -> Ended:
        """Decide what is kept, now that the forward has ended, and write a recipe for the next call of its kind."""
        self._results.close(self._frame)
        self._shelf.learn(self._results, self._frame)
        self._shelf.close()
        return Ended(self._results.num_needed, self._results, self._results.num_bytes(self._frame))
