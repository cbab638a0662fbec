"""Keep the results of expensive functions, so that a replay need not call them.

Both modes work on the functions that Python calls, not on the operators behind them: a call costs two microseconds,
and a replay does without the whole function. What a kept function saves is made anew from its operands.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from memopt.errors import ReplayError
from memopt.ir import OpPolicy
from memopt.operands import Source, operands_of, source_of
from memopt.operations import FINDERS, cheap, draws, family_of
from memopt.runtime.replay.frame import Filling, Frame, Handle
from memopt.tensors import storage_key

Function = Callable[..., Any]
_PLAIN = (torch.Tensor, torch.nn.Parameter)


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
                handle.value = handle.result = None

    def num_bytes(self) -> int:
        """Return the bytes of the storages that it keeps, each once."""
        storages = [tensor.untyped_storage() for tensor, _ in self.versions]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


class Results:
    """The results of one region call, in the order of the calls of all functions that the policy names."""

    def __init__(self, policy: OpPolicy, fqn: str) -> None:
        self.policy = policy
        self.calls: list[tuple[Function, Result | None]] = []
        self._fqn = fqn
        self._num_alternating = 0

    def wants(self, family: Any) -> bool:
        """Tell whether the policy keeps the next result of a family that it names."""
        if family in self.policy.always:
            return True
        self._num_alternating += 1
        return self._num_alternating % 2 == 1

    def close(self, num_saves: int) -> int:
        """Drop what was written to, or what no later save of the region depends on; return the bytes that stay."""
        num_bytes = 0
        for number, (func, result) in enumerate(self.calls):
            if result is None:
                continue
            holds = any(not isinstance(save, Source) for save in result.saves)
            if result.is_valid() and (holds or result.num_saves < num_saves):
                num_bytes += result.num_bytes()
            else:
                self.calls[number] = (func, None)
                result.forget()
        return num_bytes

    def result_of(self, number: int, func: Function) -> Result | None:
        """Return what the call of a replay may stand for; raises ReplayError where another function was called."""
        if number >= len(self.calls) or self.calls[number][0] is not func:
            raise ReplayError(self._fqn, f"called {getattr(func, '__name__', func)!r} where the forward did not")
        return self.calls[number][1]


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
        self._results.calls.append((func, result))
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


def _result(
    output: Any, operands: list[torch.Tensor], gate: list[tuple[Handle, torch.Tensor]], num_saves: int
) -> Result | None:
    """Return what can be kept of a call, None if it cannot: its results alias an operand, or it saves too much else."""
    outputs = _tensors(output)
    storages = _storages(outputs)
    if not outputs or any(type(t) not in _PLAIN for t in outputs) or storages.keys() & _storages(operands).keys():
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
        handle.value, handle.result = tensor, result
    return result


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _storages(tensors: Iterator[torch.Tensor] | list[torch.Tensor]) -> dict[int, int]:
    """Return the storages of tensors with their bytes."""
    return {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
