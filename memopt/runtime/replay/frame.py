"""One call of a checkpointed region: what it dropped, and how that is computed again."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from memopt.errors import ReplayError

Replay = Callable[["Filling"], None]
"""Runs the region's forward again, its saves going to a Filling."""

_LAST = 16
"""Of this many last saves without a gradient it is looked whether their operation fills them after it saves them."""


class Guard(Protocol):
    """What knows whether a tensor that was kept is still what it was."""

    def is_valid(self) -> bool:
        """Tell whether nobody has written to it."""


class Handle:
    """What autograd holds in the place of a saved tensor; the tensor, once it is computed again, dies with it."""

    __slots__ = ("__weakref__", "_device", "_dtype", "_shape", "frame", "guard", "value")

    def __init__(self, frame: "Frame", tensor: torch.Tensor) -> None:
        self.frame = frame
        self.value: torch.Tensor | None = None
        self.guard: Guard | None = None
        """Of a value that was kept, and not computed again."""
        self._shape = tensor.shape
        self._dtype = tensor.dtype
        self._device = tensor.device

    def keep(self, tensor: torch.Tensor, guard: Guard) -> None:
        """Hold a saved tensor, which then need not be computed again."""
        self.value, self.guard = tensor, guard

    def drop(self) -> None:
        """Leave the tensor to a replay."""
        self.value = self.guard = None

    def fill(self, tensor: torch.Tensor) -> None:
        """Take the tensor of a replay; raises ReplayError if it is not like the one that was dropped."""
        if tensor.shape != self._shape or tensor.dtype is not self._dtype or tensor.device != self._device:
            found = _told(tensor.shape, tensor.dtype, tensor.device)
            saved = _told(self._shape, self._dtype, self._device)
            raise ReplayError(self.frame.fqn, f"saved {found} where the forward saved {saved}")
        self.value = tensor.detach()


class Tail(Protocol):
    """What decides, outside of kept functions, which saves to keep after all."""

    def note(self, handle: Handle, tensor: torch.Tensor) -> None:
        """Look at one save, in order."""

    @property
    def tail_length(self) -> int:
        """How many of the last saves are kept."""


class Frame:
    """The saves of one region in one forward call. Handles own it."""

    def __init__(self, fqn: str, *, learns: bool, tail: "Tail | None" = None) -> None:
        self.fqn = fqn
        self.tail = tail
        self.replay: Replay | None = None
        """Set when the region is left; before that there is nothing to read."""
        self.gate: list[tuple[Handle, torch.Tensor]] | None = None
        """What is saved inside an expensive function, while one runs."""
        self._handles: list[weakref.ref[Handle]] = []
        self._last: deque[tuple[torch.Tensor, torch.Tensor]] | None = deque(maxlen=_LAST) if learns else None
        self._last_needed: int | None = None
        """The save with which a replay may end, None where it is not known that nothing is filled after it."""
        self._lock = threading.RLock()

    @property
    def num_saves(self) -> int:
        """How many tensors the forward saved so far."""
        return len(self._handles)

    def pack(self, tensor: torch.Tensor) -> Handle:
        """Drop one saved tensor: the hook that autograd calls in the region's forward."""
        handle = Handle(self, tensor)
        self._handles.append(weakref.ref(handle))
        if self._last is not None and not tensor.requires_grad:
            self._last.append((tensor, tensor.clone()))
        if self.gate is not None:
            self.gate.append((handle, tensor))
        elif self.tail is not None:
            self.tail.note(handle, tensor)
        return handle

    def close(self, replay: Replay, *, stops_early: bool) -> None:
        """Note how to replay the region, now that its forward has ended, and whether up to the last save will do."""
        num_kept = self.tail.tail_length if self.tail is not None else 0
        self._last_needed = self.num_saves - num_kept - 1 if stops_early else None
        self._last = self.tail = None
        self.replay = replay

    def fills_late(self) -> bool:
        """Tell, in a call that learns, whether one of the last saves was filled after it was made: RReLU's noise is."""
        return any(not torch.equal(tensor, before) for tensor, before in self._last or ())

    def value_of(self, handle: Handle) -> torch.Tensor:
        """Return a saved tensor, computed again with all that is missing around it."""
        with self._lock:
            if handle.guard is not None and not handle.guard.is_valid():
                handle.drop()
            if handle.value is None:
                self._replay()
            if handle.value is None:
                raise ReplayError(self.fqn, "saved less than the forward did")
            return handle.value

    def _replay(self) -> None:
        if self.replay is None:
            raise ReplayError(self.fqn, "cannot begin, for the forward has not ended: backward runs inside of it")
        handles = {n: handle for n, ref in enumerate(self._handles) if (handle := ref()) is not None}
        missing = {n: handle for n, handle in handles.items() if handle.value is None}
        self.replay(Filling(missing, self._last_needed))
        if torch._C._current_graph_task_id() != -1:
            refs = [weakref.ref(handle) for handle in missing.values()]
            torch.autograd.Variable._execution_engine.queue_callback(lambda: _clear(refs))  # type: ignore[attr-defined]


class Filling:
    """One replay: give the handles that wait for it what the forward saves again, by position."""

    def __init__(self, missing: dict[int, Handle], last: int | None) -> None:
        self._missing = missing
        self._last = last
        self._position = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take one saved tensor: the hook that autograd calls in the replay."""
        if not self._missing:
            raise _Filled(self)  # not before: the operation that saves a tensor may fill it after that
        handle = self._missing.pop(self._position, None)
        if handle is not None:
            handle.fill(tensor)
        self.skip()
        return tensor.detach()

    def skip(self) -> None:
        """Pass over one save that needs no tensor; end the replay where nothing comes after it."""
        self._position += 1
        if not self._missing and self._last is not None and self._position > self._last:
            raise _Filled(self)

    def end_if_filled(self) -> None:
        """End the replay where nothing is missing and no operation is under way."""
        if not self._missing:
            raise _Filled(self)

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """End the body as soon as nothing is missing any more."""
        try:
            yield
        except _Filled as stop:
            if stop.filling is not self:
                raise


class _Filled(BaseException):
    """Not an error, so that no forward catches it as one."""

    def __init__(self, filling: Filling) -> None:
        super().__init__()
        self.filling = filling


def unpack(handle: Handle) -> torch.Tensor:
    """Return what a handle stands for: the hook that autograd calls in backward."""
    return handle.frame.value_of(handle)


def _clear(refs: list["weakref.ref[Handle]"]) -> None:
    """Drop what a backward has computed and, with retain_graph, may not be the last to read."""
    for ref in refs:
        if (handle := ref()) is not None:
            handle.value = None


def _told(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"a {str(dtype).removeprefix('torch.')} tensor of shape {list(shape)} on {device}"
