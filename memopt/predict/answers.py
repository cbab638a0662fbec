"""What operators answer, by the looks of their operands: quicker than FakeTensorMode's own cache.

An answer is kept only where nothing but looks decides it: plain operators of aten whose results are new, views of an
operand or the operand itself, and whose operands have no values. All else is left to FakeTensorMode.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from memopt.tensors import storage_key

_ATOMS = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_DECIDED_OTHERWISE = frozenset(
    {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
)


class _Result(NamedTuple):
    """One tensor of an answer."""

    operand: int | None
    """Whose storage it is on; None if it has its own."""
    is_operand: bool
    """Whether it is that operand."""
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    def tensor(self, mode: FakeTensorMode, operands: Sequence[FakeTensor]) -> FakeTensor:
        """Return the tensor for these operands."""
        if self.operand is not None and self.is_operand:
            return operands[self.operand]
        with in_kernel_invocation_manager(mode):
            if self.operand is None:
                made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
            else:
                made = torch.empty(0, dtype=self.dtype, device="meta")
                made.set_(operands[self.operand].untyped_storage(), self.offset, self.shape, self.stride)
        return FakeTensor(mode, made, self.device)


class Answers:
    """The answers that a mode has given, to be given again."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[tuple[Any, ...], tuple[type | None, list[_Result | None]] | None] = {}

    def answer(self, func: Any, args: Any, kwargs: Any, ask: Callable[[], Any]) -> Any:
        """Return what an operator answers: as before, or by asking."""
        operands: list[FakeTensor] = []
        key: list[Any] = [func, torch.get_default_dtype()]  # which whole numbers divided by each other have
        if (
            not _depends_on_looks(func)
            or not _look(args, key, operands)
            or not _look(kwargs, key, operands)
            or not operands
        ):
            return ask()
        known_as = tuple(key)
        known = self._known.get(known_as, _UNKNOWN)
        if known is _UNKNOWN:
            out = ask()
            self._known[known_as] = _learned(func, out, operands)
            return out
        if known is None:
            return ask()
        kind, results = known
        made = [result and result.tensor(self._mode, operands) for result in results]
        return made[0] if kind is None else kind(made)


_UNKNOWN: Any = object()


@functools.cache
def _depends_on_looks(func: Any) -> bool:
    return func.namespace == "aten" and _DECIDED_OTHERWISE.isdisjoint(func.tags) and "lift" not in func._schema.name


def _look(value: Any, key: list[Any], operands: list[FakeTensor]) -> bool:
    """Add what a value looks like to a key; return False for one whose looks are not all there is to it."""
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None or value.layout is not torch.strided:
            return False
        operands.append(value)
        keys = torch._C._dispatch_keys(value).raw_repr()  # whether it is a lazy conjugate, of inference mode and so on
        key += (keys, value.dtype, value.shape, value.stride(), value.storage_offset(), value.fake_device)
        return True
    if kind in _ATOMS:
        key += (kind, value)
        return True
    if kind is list or kind is tuple:
        key += (kind, len(value))
        return all(_look(part, key, operands) for part in value)
    if kind is dict:
        key += value
        return all(_look(part, key, operands) for part in value.values())
    return False


def _learned(func: Any, out: Any, operands: list[FakeTensor]) -> tuple[type | None, list[_Result | None]] | None:
    """Return an answer to be given again, None for one that cannot."""
    kind = type(out) if type(out) in (tuple, list) else None
    parts = list(out) if kind else [out]
    if not parts or not all(part is None or type(part) is FakeTensor for part in parts):
        return None
    storages = [storage_key(operand) for operand in operands]
    results = [part if part is None else _result(part, operands, storages) for part in parts]
    made = [storage_key(part) for part, result in zip(parts, results, strict=True) if result and result.operand is None]
    if len(set(made)) < len(made) or not all(_is_faithful(func, *pair) for pair in zip(parts, results, strict=True)):
        return None
    return kind, results


def _result(part: FakeTensor, operands: list[FakeTensor], storages: list[int]) -> _Result:
    key = storage_key(part)
    same = next((number for number, operand in enumerate(operands) if operand is part), None)
    operand = same if same is not None else storages.index(key) if key in storages else None
    shape, stride, offset = part.shape, part.stride(), int(part.storage_offset())
    return _Result(operand, same is not None, shape, stride, offset, part.dtype, part.fake_device)


def _is_faithful(func: Any, part: FakeTensor | None, result: _Result | None) -> bool:
    """Tell whether a result says all of what it was learned from."""
    if part is None or result is None:
        return True
    if result.operand is not None:
        return result.is_operand or bool(func.is_view)
    whole = (
        sum((size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True)) + 1 if part.numel() else 0
    )
    fills = part.untyped_storage().nbytes() == whole * part.element_size() and result.offset == 0
    return fills and part.constant is None and part.device.type != "meta" and not func._schema.is_mutable
