"""Say what an expensive function saves in terms of its operands: then a replay can do without calling it."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memopt.tensors import MAX_CAST_CHAIN, VIEWS, storage_key

TENSORS = (torch.Tensor, FakeTensor)
"""Plain ones, real or as a prediction has them."""
PLAIN = (*TENSORS, torch.nn.Parameter)
"""The classes of tensors whose storage is all there is to them."""
_PLAIN_VALUES = (bool, int, float, str, torch.dtype, torch.device)


class Source(NamedTuple):
    """A saved tensor as a view of an operand, or of an operand's cast (autocast makes one)."""

    position: int
    """Which operand."""
    operand: tuple[torch.Size, tuple[int, ...], torch.dtype]
    """What the operand looked like."""
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """In elements, from the operand's first."""

    def fits(self, operands: list[torch.Tensor]) -> bool:
        """Tell whether the operands of another call look the same."""
        return self.position < len(operands) and _looks_of(operands[self.position]) == self.operand

    def view_of(self, operands: list[torch.Tensor]) -> torch.Tensor:
        """Return the saved tensor, made anew from the operands of another call."""
        operand = operands[self.position]
        if operand.dtype is not self.dtype:
            operand = operand.to(self.dtype)
        return operand.as_strided(self.shape, self.stride, operand.storage_offset() + self.offset)


def operands_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor] | None:
    """Return the tensors among arguments, in order; None where one is more than the values in its storage."""
    tensors = list(_flat((*args, *kwargs.values())))
    return tensors if all(_is_plain(t) for t in tensors) else None


def source_of(saved: torch.Tensor, operands: list[torch.Tensor]) -> Source | None:
    """Return where a tensor that was saved in a call came from, None if it was made in the call."""
    extent = _extent_of(saved)
    # First those that lie as the saved tensor does: of chunks of one tensor, each shares the storage of all.
    for position, operand in sorted(enumerate(operands), key=lambda one: _extent_of(one[1]) != extent):
        shares = storage_key(saved) == storage_key(operand)
        if (shares and saved.dtype is operand.dtype) or _is_cast(saved, operand):
            offset = int(saved.storage_offset()) - int(operand.storage_offset() if shares else 0)
            return Source(position, _looks_of(operand), saved.dtype, saved.shape, saved.stride(), offset)
    return None


def looks_of_call(operands: list[torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what the arguments of a call look like. Equal looks: the function did the same, to other values."""
    return _shared(operands), _look(args), tuple(kwargs), _look(tuple(kwargs.values()))


def _shared(operands: list[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    """Return for each operand the first one that lies on its storage, and how far behind that: a source may name it."""
    keys = [storage_key(operand) for operand in operands]
    offsets = [int(operand.storage_offset()) for operand in operands]
    firsts = [keys.index(key) for key in keys]
    return tuple((first, offset - offsets[first]) for first, offset in zip(firsts, offsets, strict=True))


def _look(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (*_looks_of(value), value.device, value.requires_grad)
    if isinstance(value, (tuple, list)):
        return tuple(map(_look, value))
    return value if value is None or type(value) in _PLAIN_VALUES else object()  # equal to nothing


def _looks_of(operand: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return operand.shape, operand.stride(), operand.dtype


def _extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    return int(tensor.storage_offset()), tensor.numel()


def _is_plain(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in PLAIN
    return plain and tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _is_cast(saved: torch.Tensor, operand: torch.Tensor) -> bool:
    """Tell, by the autograd graph, whether a tensor is views of one cast of another."""
    if saved.dtype is operand.dtype or not operand.requires_grad:
        return False
    if saved.untyped_storage().nbytes() != operand.numel() * saved.element_size():
        return False
    node = saved.grad_fn
    for _ in range(MAX_CAST_CHAIN):
        if node is None or node.name() not in VIEWS or len(node.next_functions) != 1:
            break
        node = node.next_functions[0][0]
    if node is None or node.name() != "ToCopyBackward0":
        return False
    source, output = node.next_functions[0]
    if operand.grad_fn is None:
        return getattr(source, "variable", None) is operand
    return source is operand.grad_fn and output == operand.output_nr  # chunks of one tensor have one grad_fn


def _flat(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _flat(value)
