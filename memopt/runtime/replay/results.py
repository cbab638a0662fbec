"""The results of expensive functions that a region keeps, and the saves at its end that it keeps with them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from memopt.errors import ReplayError
from memopt.ir import MAX_TAIL_TENSOR_BYTES, Family, OpPolicy
from memopt.operands import PLAIN, Source, source_of
from memopt.runtime.replay.frame import Frame
from memopt.runtime.replay.places import SAME_VERSION, Call, Function, Place, geometry_of
from memopt.tensors import storage_key


@dataclass(slots=True, eq=False)
class Result:
    """What one call of an expensive function returned and saved."""

    call: Call
    outputs: Any
    """As returned, with every tensor detached."""
    need_grad: tuple[bool, ...]
    saves: tuple[Source | int, ...]
    """In order: a view of an operand, or the position of a save that is kept."""
    versions: tuple[tuple[torch.Tensor, int], ...]
    storages: dict[int, int] = field(default_factory=dict)
    """What it keeps, with bytes."""
    parameters: tuple[int, ...] = ()
    """Those among the operands, by identity."""
    place: Place | None = None
    """Where else its output was seen."""
    returns_own: bool = False
    """Whether a write to what it saved itself would count as one to its output, if that lies on the same storage."""

    def is_valid(self) -> bool:
        """Tell whether nobody has written to it since. A function's output has the version that its users see."""
        return all(tensor._version == version for tensor, version in self.versions)

    def again(self) -> Any:
        """Return the outputs as the function would."""
        if isinstance(self.outputs, torch.Tensor):
            return self.outputs.detach().requires_grad_(self.need_grad[0])
        need_grad = iter(self.need_grad)
        return tree_map_only(torch.Tensor, lambda t: t.detach().requires_grad_(next(need_grad)), self.outputs)

    def held(self) -> list[int]:
        """Return the positions of what the function saved itself, and the frame holds."""
        return [save for save in self.saves if isinstance(save, int)]


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

    def __init__(self, policy: OpPolicy, frame: Frame) -> None:
        self.policy = policy
        self.calls: list[tuple[Function, Result | None]] = []
        self._by_storage: dict[int, Result] = {}
        self._tail: list[int] = []
        self._tail_budget_bytes = 0
        self.fqn = frame.fqn
        self.num_needed = 0
        """How many saves there are before the tail, once the forward has ended."""
        self._num_alternating = 0

    def wants(self, family: Family) -> bool:
        """Tell whether the policy keeps the next result of a family that it names."""
        if family in self.policy.always:
            return True
        self._num_alternating += 1
        return self._num_alternating % 2 == 1

    def add(self, frame: Frame, func: Function, result: Result | None) -> None:
        """Note a call of a function that the policy names, and its result where that is kept."""
        self.calls.append((func, result))
        self._drop_tail(frame)  # the replay must come as far as this call
        if result is not None:
            self._by_storage |= dict.fromkeys(result.storages, result)
            self._tail_budget_bytes = 0 if result.held() else sum(result.storages.values())

    def see(
        self, frame: Frame, tensor: torch.Tensor, position: int, module: int | None = None, leaf: int | None = None
    ) -> None:
        """Note where the output of a function is found again: in a save, or in what a module returns."""
        result = self._by_storage.get(storage_key(tensor)) if tensor.layout is torch.strided else None
        if result is not None and result.place is None and result.call.returned(tensor, frame):
            result.place = Place(geometry_of(tensor), position, module, leaf)

    def note(self, frame: Frame, position: int, tensor: torch.Tensor) -> None:
        """Keep a save outside of kept functions for the time being, or give up those before it."""
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
            self._drop_tail(frame)
            return
        result, num_bytes = self._by_storage.get(storage_key(tensor)), tensor.untyped_storage().nbytes()
        if result is None and num_bytes > MAX_TAIL_TENSOR_BYTES:
            if num_bytes > self._tail_budget_bytes:
                if self._tail:
                    self._drop_tail(frame)
                self._tail_budget_bytes = 0
                return
            self._tail_budget_bytes -= num_bytes
        held = tensor.detach()
        frame.keep(position, held, Held(held, held._version, result))
        self._tail.append(position)

    def close(self, frame: Frame) -> None:
        """Drop what was written to, or what nothing in the replay depends on."""
        self.num_needed = frame.num_saves - len(self._tail)
        guards = [frame.guard_of(position) for position in self._tail]
        used = {id(guard.result) for guard in guards if isinstance(guard, Held)}
        for number, (func, result) in enumerate(self.calls):
            if result is None:
                continue
            is_read = bool(result.held()) or id(result) in used or result.call.end < self.num_needed
            if not is_read or not result.is_valid():
                self.calls[number] = (func, None)
                for position in result.held():
                    frame.drop(position)
        self._by_storage.clear()

    def tail(self, frame: Frame, kept: list[Result]) -> dict[int, int | None]:
        """Return the positions of the tail, and on which of some results each lies."""
        guards = ((position, frame.guard_of(position)) for position in self._tail)
        held = ((position, guard.result) for position, guard in guards if isinstance(guard, Held))
        return {p: None if result is None else kept.index(result) for p, result in held if not result or result in kept}

    def num_bytes(self, frame: Frame) -> int:
        """Return the bytes of the storages that are kept, each once."""
        guards = [frame.guard_of(position) for position in self._tail]
        kept = storages_of(guard.tensor for guard in guards if isinstance(guard, Held))
        for _, result in self.calls:
            kept |= result.storages if result is not None else {}
        return sum(kept.values())

    def result_of(self, number: int, func: Function, position: int) -> Result | None:
        """Return what stands for a call in the replay; raises ReplayError where the forward called another function."""
        if number >= len(self.calls) or self.calls[number][0] is not func:
            raise ReplayError(self.fqn, f"called {getattr(func, '__name__', func)!r} where the forward did not")
        return self.calls[number][1]

    def fits(self, result: Result, operands: list[torch.Tensor], args: Any, kwargs: Any) -> bool:
        """Tell whether what a call saves can be made from the operands of the replay."""
        return all(save.fits(operands) for save in result.saves if isinstance(save, Source))

    def _drop_tail(self, frame: Frame) -> None:
        for position in self._tail:
            frame.drop(position)
        self._tail.clear()
        self._tail_budget_bytes = 0


def result_of_call(
    call: Call, output: Any, operands: list[torch.Tensor], gate: list[tuple[int, torch.Tensor]], frame: Frame
) -> Result | None:
    """Return what can be kept of a call, None if it cannot: its results alias an operand, or it saves too much else."""
    outputs = _tensors(output)
    storages = storages_of(outputs)
    if not outputs or any(type(t) not in PLAIN or t.is_inference() for t in outputs):
        return None
    if any(storage_key(operand) in storages for operand in operands):
        return None
    saves = [(position, tensor, source_of(tensor, operands)) for position, tensor in gate]
    held = [(position, tensor.detach()) for position, tensor, source in saves if source is None]
    others = storages_of(tensor for _, tensor in held)
    if 2 * sum(size for key, size in others.items() if key not in storages) > sum(storages.values()):
        return None
    kept = output.detach() if output is outputs[0] else tree_map_only(torch.Tensor, torch.Tensor.detach, output)
    tensors = [*_tensors(kept), *(tensor for _, tensor in held)]
    result = Result(
        call,
        outputs=kept,
        need_grad=tuple(t.requires_grad for t in outputs),
        saves=tuple(position if source is None else source for position, _, source in saves),
        versions=tuple((t, t._version) for t in tensors),
        storages=storages | others,
        parameters=tuple(id(operand) for operand in operands if isinstance(operand, nn.Parameter)),
        returns_own=bool(held) and output is outputs[0] and call.returned(output, frame, SAME_VERSION),
    )
    for position, tensor in held:
        frame.keep(position, tensor, result)
    return result


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def storages_of(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the storages of tensors with their bytes."""
    return {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
