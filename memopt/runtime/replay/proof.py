"""Prove that a replay computes what the forward did, from a few values of each tensor that the forward saved.

A replay finds arguments, attributes, buffers and random streams as the forward found them. A forward that depends on
anything else that it changes (an iterator, an array, a cache) saves other values then, of the same shapes.
"""

from collections import deque
from collections.abc import Collection, Mapping

import torch
from torch._dynamo.eval_frame import skip_code

from memopt.errors import BackwardInsideError, ReplayError, SavedTensorModifiedError
from memopt.operands import PLAIN
from memopt.runtime.prediction import alike, predicts
from memopt.runtime.replay.arguments import version_of
from memopt.tensors import is_odd, storage_key

_LAST = 16
"""Of this many last saves without a gradient it is looked whether their operation fills them after it saves them."""
_NUM_VALUES = 64
"""How many values of a tensor are compared."""
_TOLERANCE = 0.02
"""How far apart, by norm: kernels that add in any order differ in their last bits, in bfloat16 by a percent."""
_MAX_UNLIKE = 0.1
"""What part of the integers or flags may differ, where they are not few: some follow from such last bits."""
_FEW = 8
_INTEGERS = (torch.bool, torch.int8, torch.int16, torch.int32, torch.int64)
"""Not uint8: those are a kernel's own notes, and only partly filled."""


_looks: dict[int, tuple[torch.Size, torch.dtype]] = {}
"""What the hash of a save's looks stands for."""


class Record:
    """What a region's forward saves, while it runs, in a call that learns; all of it, or what tells of late filling."""

    def __init__(self, parameters: tuple[torch.Tensor, ...], statistics: Collection[int], *, holds: bool) -> None:
        self._holds = holds
        self._parameters = parameters
        self._statistics = statistics
        """Storages that a BatchNorm saves and writes to; its backward does not read them."""
        self._grads: list[tuple[torch.Tensor | None, int]] = []
        self._saves: list[tuple[torch.Tensor, int]] = []
        self._last: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=_LAST)
        self.was_read = False
        """Whether a backward inside the forward has asked for one of them."""

    def note(self, tensor: torch.Tensor, look: int) -> None:
        """Take one saved tensor, without its graph: with it this would be a cycle."""
        _looks.setdefault(look, (tensor.shape, tensor.dtype))
        if self._holds:
            self._saves.append((tensor.detach(), version_of(tensor)))
        if not tensor.requires_grad and tensor.layout is torch.strided:
            self._last.append((tensor, tensor.clone()))

    def read(self, fqn: str, position: int) -> torch.Tensor:
        """Return a saved tensor to a backward inside the forward."""
        if not self._holds:
            raise BackwardInsideError(fqn, "did not in its first call: let every call do so")
        if not self.was_read:
            self.was_read = True
            self._grads = self._grads_now()
        tensor, version = self._saves[position]
        if (now := version_of(tensor)) != version:
            raise SavedTensorModifiedError(fqn, tuple(tensor.shape), version, now)
        return tensor

    def adds_to_grads(self) -> bool:
        """Tell whether the backward inside the forward was one that adds to gradients, as `torch.autograd.grad` does not."""
        pairs = zip(self._grads_now(), self._grads, strict=True)
        return self.was_read and any(now is not then or version != before for (now, version), (then, before) in pairs)

    def _grads_now(self) -> list[tuple[torch.Tensor | None, int]]:
        return [(p.grad, -1 if p.grad is None else version_of(p.grad)) for p in self._parameters]

    def fills_late(self) -> bool:
        """Tell whether one of the last saves was filled after it was made: RReLU's noise is."""
        return any(not alike(tensor, before) for tensor, before in self._last)

    def samples(self, released: Collection[int]) -> "Samples":
        """Return a few values of each tensor, now that all are filled; the host does not wait for them.

        Not of one that was written to since: nobody may ask for it. Parameters too: a forward may write to their ``.data``.
        """
        saves = ((n, t) for n, (t, version) in enumerate(self._saves) if version_of(t) == version)
        return Samples({n: t for n, t in saves if n not in released and not self._is_statistics(t)})

    def _is_statistics(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and storage_key(tensor) in self._statistics


class Samples:
    """A few values of each tensor that a forward saved, by position."""

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        self._picks: dict[tuple[int, torch.device], torch.Tensor] = {}
        with torch.no_grad():
            self._values = {position: self._pick(tensor) for position, tensor in tensors.items() if _has_values(tensor)}
        self._shapes = {position: list(tensor.shape) for position, tensor in tensors.items()}

    def check(self, fqn: str, again: Mapping[int, torch.Tensor]) -> None:
        """Raise ReplayError if a tensor that was computed again has other values; the host waits once."""
        compared = [position for position in self._values if position in again and _has_values(again[position])]
        if not compared or predicts():
            return
        with torch.no_grad():
            answers = [_is_unlike(self._values[n], self._pick(again[n])) for n in compared]
            on_host = torch.stack([answer.to(answers[0].device) for answer in answers]).tolist()
        for position, is_unlike in zip(compared, on_host, strict=True):
            if is_unlike:
                what = f"computed other values than the forward did for saved tensor {position}"
                raise ReplayError(fqn, f"{what}, of shape {self._shapes[position]}")

    def _pick(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a few values, whatever the strides."""
        if tensor.numel() <= _NUM_VALUES:
            return tensor.flatten().clone()
        key = tensor.numel(), tensor.device
        if key not in self._picks:
            self._picks[key] = _picks(*key)
        return torch.take(tensor, self._picks[key])


def look_of(look: int) -> str:
    """Return in words what a hash of looks stands for, as far as a call that learns has met it."""
    return described(*_looks[look]) if look in _looks else "another"


def described(shape: torch.Size, dtype: torch.dtype) -> str:
    """Return in words what a tensor looks like."""
    return f"a {str(dtype).removeprefix('torch.')} tensor of shape {list(shape)}"


def _has_values(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's storage holds values that can be compared; FSDP takes it away."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or is_odd(tensor):
        return False
    if tensor.dtype is torch.int64 and tensor.numel() <= 2:
        return False  # fused attention saves a seed and an offset, and leaves them unset without dropout
    is_float = tensor.is_floating_point() and tensor.dtype.itemsize > 1
    return (is_float or tensor.dtype in _INTEGERS) and tensor.untyped_storage().nbytes() > 0


def _picks(num_values: int, device: torch.device) -> torch.Tensor:
    """Return places spread over a tensor by the golden ratio: even steps would stay within one column."""
    fractions = torch.arange(_NUM_VALUES, device=device, dtype=torch.float64) * 0.6180339887498949 % 1
    return (fractions * num_values).long()


def _is_unlike(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Tell, on the device, whether two samples differ by more than rounding does."""
    unlike = one != other
    if not one.is_floating_point():
        return unlike.sum() > (_MAX_UNLIKE * one.numel() if one.numel() >= _FEW else 0)
    one, other = one.double(), other.double()
    unlike = unlike & ~(one.isnan() & other.isnan())
    gap = torch.linalg.vector_norm((one - other).where(unlike, 0.0))
    size = torch.linalg.vector_norm(one.where(one.isfinite(), 0.0))
    return ~(gap <= _TOLERANCE * size)  # a gap that is no number is one


skip_code(Record.note.__code__)  # called while a module inside the region may be compiled
