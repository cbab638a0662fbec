"""Keep the results of expensive functions, so that a replay need not call them.

Both modes work on the functions that Python calls, not on the operators behind them: a call costs two microseconds,
and a replay does without the whole function. What a kept function saves is made anew from its operands.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from memopt.errors import ReplayError
from memopt.ir import Family, OpPolicy
from memopt.operands import Source, operands_of, source_of
from memopt.operations import FINDERS, cheap, draws, family_of
from memopt.runtime.replay.frame import Filling, Frame, Handle
from memopt.tensors import storage_key

Function = Callable[..., Any]
PLAIN = (torch.Tensor, torch.nn.Parameter)
MAX_TAIL_TENSOR_BYTES = 1 << 20
"""How large a save at the end of a region may be to be kept: indices and weights of a router are, activations are not."""


@dataclass(slots=True, eq=False)
class Result:
    """What one call of an expensive function returned and saved."""

    outputs: Any
    """As returned, with every tensor detached."""
    need_grad: tuple[bool, ...]
    saves: tuple[Source | weakref.ref[Handle], ...]
    """In order: a view of an operand, or the handle that holds its tensor; not the handle itself, which owns all this."""
    versions: tuple[tuple[torch.Tensor, int], ...]
    num_saves: int
    """How many saves of the region had been made when the function returned."""

    def is_valid(self) -> bool:
        """Tell whether nobody has written to it since. A function's output has the version that its users see."""
        return all(tensor._version == version for tensor, version in self.versions)

    def fits(self, operands: list[torch.Tensor] | None) -> bool:
        """Tell whether what it saves can be made from these operands."""
        return operands is not None and all(s.fits(operands) for s in self.saves if isinstance(s, Source))

    def again(self) -> Any:
        """Return the outputs as the function would."""
        if isinstance(self.outputs, torch.Tensor):
            return self.outputs.detach().requires_grad_(self.need_grad[0])
        need_grad = iter(self.need_grad)
        return tree_map_only(torch.Tensor, lambda t: t.detach().requires_grad_(next(need_grad)), self.outputs)

    def forget(self) -> None:
        """Leave what its handles hold to the replay."""
        for save in self.saves:
            if not isinstance(save, Source) and (handle := save()) is not None:
                handle.drop()

    def holds(self) -> bool:
        """Tell whether it holds something that the function saved itself."""
        return any(not isinstance(save, Source) for save in self.saves)


@dataclass(slots=True, eq=False)
class Held:
    """A small save, or one on a kept result, as it was saved."""

    tensor: torch.Tensor
    version: int
    result: Result | None

    def is_valid(self) -> bool:
        """Tell whether nobody has written to it since."""
        return self.tensor._version == self.version and (self.result is None or self.result.is_valid())


class Results:
    """The results of one region call, in the order of the calls of all functions that the policy names.

    Its tail is kept too: the last saves, as long as they are small, lie on kept results, or take no more than the last
    result, which then need not stay. The replay ends before them.
    """

    def __init__(self, policy: OpPolicy, fqn: str) -> None:
        self.policy = policy
        self.calls: list[tuple[Function, Result | None]] = []
        self._by_storage: dict[int, Result] = {}
        self._tail: list[weakref.ref[Handle]] = []
        self._tail_budget_bytes = 0
        self._fqn = fqn
        self._num_alternating = 0

    def wants(self, family: Family) -> bool:
        """Tell whether the policy keeps the next result of a family that it names."""
        if family in self.policy.always:
            return True
        self._num_alternating += 1
        return self._num_alternating % 2 == 1

    def add(self, func: Function, result: Result | None) -> None:
        """Note a call of a function that the policy names, and its result where that is kept."""
        self.calls.append((func, result))
        if result is not None:
            self._by_storage |= {storage_key(tensor): result for tensor, _ in result.versions}
            if any(isinstance(save, Source) for save in result.saves):
                self._drop_tail()
                self._tail_budget_bytes = (
                    0 if result.holds() else sum(_storages(t for t, _ in result.versions).values())
                )

    def note(self, handle: Handle, tensor: torch.Tensor) -> None:
        """Keep a save outside of kept functions for the time being, or give up those before it."""
        if type(tensor) in PLAIN and tensor.layout is torch.strided:
            result = self._by_storage.get(storage_key(tensor))
            num_bytes = tensor.untyped_storage().nbytes()
            fits = num_bytes <= self._tail_budget_bytes
            if result is not None or num_bytes <= MAX_TAIL_TENSOR_BYTES or fits:
                if result is None and num_bytes > MAX_TAIL_TENSOR_BYTES:
                    self._tail_budget_bytes -= num_bytes
                held = tensor.detach()
                handle.keep(held, Held(held, held._version, result))
                self._tail.append(weakref.ref(handle))
                return
        self._drop_tail()

    @property
    def tail_length(self) -> int:
        """How many of the last saves are kept."""
        return len(self._tail)

    def close(self, num_saves: int) -> int:
        """Drop what was written to, or what nothing in the replay depends on; return the bytes that stay."""
        held = [handle.guard for ref in self._tail if (handle := ref()) is not None]
        used = {id(guard.result) for guard in held if isinstance(guard, Held)}
        kept: dict[int, int] = _storages(guard.tensor for guard in held if isinstance(guard, Held))
        for number, (func, result) in enumerate(self.calls):
            if result is None:
                continue
            if result.is_valid() and (
                result.holds() or id(result) in used or result.num_saves < num_saves - self.tail_length
            ):
                kept |= _storages(tensor for tensor, _ in result.versions)
            else:
                self.calls[number] = (func, None)
                result.forget()
        self._by_storage.clear()
        return sum(kept.values())

    def result_of(self, number: int, func: Function) -> Result | None:
        """Return what the call of a replay may stand for; raises ReplayError where another function was called."""
        if number >= len(self.calls) or self.calls[number][0] is not func:
            raise ReplayError(self._fqn, f"called {getattr(func, '__name__', func)!r} where the forward did not")
        return self.calls[number][1]

    def _drop_tail(self) -> None:
        for ref in self._tail:
            if (handle := ref()) is not None:
                handle.drop()
        self._tail.clear()
        self._tail_budget_bytes = 0


class Keeping(TorchFunctionMode):
    """Keep results while a region's forward runs."""

    def __init__(self, results: Results, frame: Frame) -> None:
        super().__init__()
        self._results = results
        self._frame = frame

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function; keep what the policy names."""
        if FINDERS.get(func) is cheap:
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        family = family_of(func, args, kwargs)
        if family is None or family not in self._results.policy:
            return func(*args, **kwargs)
        result = None
        if self._results.wants(family) and not draws(func, args, kwargs):
            output, result = self._call(func, args, kwargs)
        else:
            output = func(*args, **kwargs)
        self._results.add(func, result)
        return output

    def _call(self, func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Result | None]:
        operands = operands_of(args, kwargs)
        if operands is None or self._frame.gate is not None:
            return func(*args, **kwargs), None
        gate: list[tuple[Handle, torch.Tensor]] = []
        self._frame.gate = gate
        try:
            output = func(*args, **kwargs)
        finally:
            self._frame.gate = None
        return output, _result(output, operands, gate, self._frame.num_saves)


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
            return func(*args, **(kwargs or {}))
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


def _result(
    output: Any, operands: list[torch.Tensor], gate: list[tuple[Handle, torch.Tensor]], num_saves: int
) -> Result | None:
    """Return what can be kept of a call, None if it cannot: its results alias an operand, or it saves too much else."""
    outputs = _tensors(output)
    storages = _storages(outputs)
    if not outputs or any(type(t) not in PLAIN for t in outputs) or storages.keys() & _storages(operands).keys():
        return None
    saves = [(handle, tensor, source_of(tensor, operands)) for handle, tensor in gate]
    others = _storages(tensor for _, tensor, source in saves if source is None)
    if 2 * sum(size for key, size in others.items() if key not in storages) > sum(storages.values()):
        return None
    held = [(handle, tensor.detach()) for handle, tensor, source in saves if source is None]
    kept = output.detach() if output is outputs[0] else tree_map_only(torch.Tensor, torch.Tensor.detach, output)
    tensors = [*_tensors(kept), *(tensor for _, tensor in held)]
    result = Result(
        outputs=kept,
        need_grad=tuple(t.requires_grad for t in outputs),
        saves=tuple(weakref.ref(handle) if source is None else source for handle, _, source in saves),
        versions=tuple((t, t._version) for t in tensors),
        num_saves=num_saves,
    )
    for handle, tensor in held:
        handle.keep(tensor, result)
    return result


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the storages of tensors with their bytes."""
    return {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
