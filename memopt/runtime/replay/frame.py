"""One call of a checkpointed region: what it dropped, and how that is computed again."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from memopt.errors import ReplayError

if TYPE_CHECKING:
    from memopt.runtime.replay.selective import Result

Replay = Callable[["Filling"], None]
"""Runs the region's forward again, its saves going to a Filling."""

_LAST = 4
"""Of this many last saves without a gradient it is looked whether their operation fills them after it saves them."""


class Handle:
    """What autograd holds in the place of a saved tensor; the tensor, once it is computed again, dies with it."""

    __slots__ = ("__weakref__", "_looks", "frame", "result", "value")

    def __init__(self, frame: "Frame", tensor: torch.Tensor) -> None:
        self.frame = frame
        self.value: torch.Tensor | None = None
        self.result: Result | None = None
        """The kept result that `value` is a part of."""
        self._looks = _looks_of(tensor)

    def fill(self, tensor: torch.Tensor) -> None:
        """Take the tensor of a replay; raises ReplayError if it is not like the one that was dropped."""
        if (looks := _looks_of(tensor)) != self._looks:
            raise ReplayError(self.frame.fqn, f"saved {_told(looks)} where the forward saved {_told(self._looks)}")
        self.value = tensor.detach()


class Frame:
    """The saves of one region in one forward call. Handles own it."""

    def __init__(self, fqn: str, *, learns: bool) -> None:
        self.fqn = fqn
        self.replay: Replay | None = None
        """Set when the region is left; before that there is nothing to read."""
        self.gate: list[tuple[Handle, torch.Tensor]] | None = None
        """What is saved inside an expensive function, while one runs."""
        self._handles: list[weakref.ref[Handle]] = []
        self._last: deque[tuple[torch.Tensor, torch.Tensor]] | None = deque(maxlen=_LAST) if learns else None
        self._stops_early = False
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
        return handle

    def close(self, replay: Replay, *, stops_early: bool) -> None:
        """Note how to replay the region, now that its forward has ended, and whether up to the last save will do."""
        self._last = None
        self._stops_early = stops_early
        self.replay = replay

    def fills_late(self) -> bool:
        """Tell, in a call that learns, whether one of the last saves was filled after it was made: RReLU's noise is."""
        return any(not torch.equal(tensor, before) for tensor, before in self._last or ())

    def value_of(self, handle: Handle) -> torch.Tensor:
        """Return a saved tensor, computed again with all that is missing around it."""
        with self._lock:
            if handle.result is not None and not handle.result.is_valid():
                handle.result = handle.value = None
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
        last = len(self._handles) - 1 if self._stops_early else None
        self.replay(Filling(missing, last))
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
        if not self._missing and self._position - 1 == self._last:
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


def _looks_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _told(looks: tuple[Any, ...]) -> str:
    shape, dtype, device = looks
    return f"a {str(dtype).removeprefix('torch.')} tensor of shape {list(shape)} on {device}"
