"""The swap engine of one device: it owns the streams, the host pool and the order of copies. Ownership is the slots'."""

import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch

from memopt.errors import GraphCaptureError
from memopt.runtime.backends import Backend, Event, backend_for
from memopt.runtime.counters import Counters
from memopt.runtime.host_memory import available_host_bytes
from memopt.runtime.pool import Block, HostPool
from memopt.runtime.prediction import predicted_engine
from memopt.runtime.slot import Leftover, Slot, State
from memopt.units import format_bytes

IN_FLIGHT_BYTES = 1 << 30
"""How many bytes may be on their way out before the computation waits for the oldest of them."""
HOST_SHARE = 0.8
"""How much of the host memory that is available at the start the pool may take."""


class Engine:
    """Swap storages of one device out to the host and back."""

    def __init__(
        self, backend: Backend, *, cap_bytes: int | None = None, in_flight_bytes: int = IN_FLIGHT_BYTES
    ) -> None:
        cap_bytes = int(available_host_bytes() * HOST_SHARE) if cap_bytes is None else cap_bytes
        self.backend = backend
        self.pool = HostPool(backend.allocate_host, cap_bytes=cap_bytes, slab_bytes=backend.slab_bytes)
        self.leftovers: deque[Leftover] = deque()
        self.shared: WeakValueDictionary[tuple[Any, ...], Slot] = WeakValueDictionary()
        """The slots that the regions of one forward may share, by (forward, storage, version) and, of a gathered view,
        geometry: while one lives, its storage's identity is taken."""
        self._pending: deque[Leftover] = deque()
        self._captured: list[Block] = []
        """Host memory that belongs to CUDA graphs."""
        self._leaving: deque[tuple[Event, int, list[weakref.ref[Slot]]]] = deque()
        self._leaving_bytes = 0
        self._in_flight_bytes = in_flight_bytes
        self._warned = False
        self._lock = threading.RLock()

    def copy_out(self, slots: Iterable[Slot], counters: Counters, *, max_inflight: int | None = None) -> None:
        """Start copying to the host what is only on the device; give back the memory of what has arrived.

        With `max_inflight` the computation waits until no more than that many groups are on their way.
        """
        with self._lock:
            self.collect()
            moving = [slot for slot in slots if self._can_leave(slot)]
            if moving:
                copies = [(slot.flat(), slot.host.memory) for slot in moving if slot.host is not None]
                event = self.backend.copy_out(copies)
                self._leave(moving, event)
                counters.copied_out_tensors += len(moving)
                counters.copied_out_bytes += sum(slot.num_bytes for slot in moving)
            self._settle(self._in_flight_bytes, max_inflight)

    def settle(self) -> None:
        """Let the computation wait for all that is on its way out, and give back the memory of it."""
        with self._lock:
            self._settle(0)
            self.collect()

    def load(self, slots: Iterable[Slot], counters: Counters) -> None:
        """Start copying back what is on the host; what has not left the device yet just stays there."""
        with self._lock:
            self.collect()  # backward is when memory is short: what stayed, and was used, need not wait for a forward
            coming = []
            for slot in slots:
                if slot.state is State.OFFLOADING:
                    slot.state = State.STAYING
                    self._join(slot.event)
                elif slot.state is State.HOST:
                    coming.append(slot)
            if coming:
                self._load(coming)
                counters.copied_in_tensors += len(coming)
                counters.copied_in_bytes += sum(slot.num_bytes for slot in coming)

    def tensor_of(self, slot: Slot, counters: Counters) -> torch.Tensor:
        """Return a tensor on a slot's storage on the device, once the calling stream's computation may read it."""
        with self._lock:
            if slot.state is State.HOST:
                self.load([slot], counters)
            assert slot.device is not None
            if slot.readers is not None and (here := self.backend.here()) not in slot.readers:
                assert slot.event is not None
                self.backend.wait(slot.event, slot.device)
                if here == slot.event.origin_id:
                    slot.readers.add(here)  # one wait does for all that came with it
                else:  # the memory of each must be told of another stream
                    slot.readers = slot.readers | {here}
            if slot.state is State.LOADING:
                slot.state, slot.version = State.RESIDENT, slot.device._version
            return slot.device

    def collect(self) -> None:
        """Give back to the pool what dead slots left, up to the first that a copy still uses."""
        with self._lock:
            while self.leftovers:
                self._pending.append(self.leftovers.popleft())
            while self._pending and ((event := self._pending[0].event) is None or self._join(event) or event.done()):
                left = self._pending.popleft()
                if left.host is not None:
                    self._give(left.host, event)

    def finish(self) -> None:
        """Wait for every copy that is on its way out, and hold no memory of the device any more."""
        with self._lock:
            self._settle(0)
            self.collect()
            self._pending = deque(map(self._off_the_device, self._pending))
            self.collect()

    def _off_the_device(self, left: Leftover) -> Leftover:
        """Let the computation wait for a copy, so that its memory is free; not across the border of a capture."""
        event = left.event
        if left.device is None or event is None or event.is_captured != self.backend.is_capturing():
            return left
        if not event.done():
            self.backend.release_after(event)
        return left._replace(device=None)

    def _join(self, event: Event | None) -> bool:
        """Within a capture make the computation wait for a copy: all that was captured must come together in the end."""
        if event is None or not event.is_captured or not self.backend.is_capturing():
            return False
        self.backend.release_after(event)
        return True

    def _give(self, block: Block, event: Event | None) -> None:
        """Give a block back to the pool, or never, if a graph will write to it each time that it runs."""
        if event is not None and event.is_captured:
            self._captured.append(block)
        else:
            self.pool.give(block)

    def _take(self, num_bytes: int) -> Block | None:
        """Return host memory; raises a GraphCaptureError where it would have to be allocated within a capture."""
        if not self.pool.has(num_bytes) and self.backend.is_capturing():
            raise GraphCaptureError(num_bytes)
        return self.pool.take(num_bytes)

    def _can_leave(self, slot: Slot) -> bool:
        """Take host memory for a slot that is still to be copied out."""
        if slot.state is not State.RESIDENT or slot.host is not None:
            return False
        assert slot.device is not None
        if slot.device._version != slot.version:
            slot.state, slot.device = State.STALE, None
            return False
        slot.host = self._take(slot.num_bytes)
        if slot.host is None and not self._warned:
            self._warned = True
            warnings.warn(
                f"memopt: the host pool is full at {format_bytes(self.pool.held_bytes)} "
                f"(cap {format_bytes(self.pool.cap_bytes)}); further tensors stay on the device",
                stacklevel=2,
            )
        return slot.host is not None

    def _leave(self, slots: list[Slot], event: Event) -> None:
        for slot in slots:
            slot.state, slot.event = State.OFFLOADING, event
        num_bytes = sum(slot.num_bytes for slot in slots)
        self._leaving.append((event, num_bytes, [weakref.ref(slot) for slot in slots]))
        self._leaving_bytes += num_bytes

    def _settle(self, limit_bytes: int, limit_groups: int | None = None) -> None:
        """Drop the device copies of what has arrived; wait for the oldest while more than the limits is under way."""
        while self._leaving and (
            self._leaving[0][0].done()
            or self._leaving_bytes > limit_bytes
            or (limit_groups is not None and len(self._leaving) > limit_groups)
        ):
            event, num_bytes, slots = self._leaving.popleft()
            self._leaving_bytes -= num_bytes
            if not event.done():
                self.backend.release_after(event)
            for slot in filter(None, (ref() for ref in slots)):
                if slot.state is State.OFFLOADING:
                    slot.state, slot.device = State.HOST, None

    def _load(self, slots: list[Slot]) -> None:
        copies, after = [], set()
        with torch.inference_mode(False):  # backward may run in it; the copy is written to by another thread
            for slot in slots:
                assert slot.host is not None and slot.event is not None
                slot.device = torch.empty(slot.num_bytes, dtype=torch.uint8, device=self.backend.device)
                copies.append((slot.host.memory, slot.device))
                after.add(slot.event)
        event = self.backend.copy_in(copies, after)
        readers: set[int] = set()
        for slot in slots:
            slot.state, slot.event, slot.readers = State.LOADING, event, readers


_ENGINES: dict[torch.device, Engine] = {}
_ENGINES_LOCK = threading.Lock()
os.register_at_fork(after_in_child=_ENGINES.clear)  # a child has the engines, but not their threads


def engines_in_use(devices: Iterable[torch.device]) -> list[Engine]:
    """Return the engines of those devices that have one."""
    with _ENGINES_LOCK:
        return [_ENGINES[device] for device in devices if device in _ENGINES]


def engines_at_work() -> list[Engine]:
    """Return the engine of this thread's prediction, else all that there are."""
    if (predicted := predicted_engine()) is not None:
        return [predicted]
    with _ENGINES_LOCK:
        return list(_ENGINES.values())


def engine_of(device: torch.device) -> Engine:
    """Return the engine of a device, made when first asked for; in a prediction its own."""
    if (predicted := predicted_engine()) is not None:
        return predicted  # type: ignore[no-any-return]
    with _ENGINES_LOCK:
        if device not in _ENGINES:
            _ENGINES[device] = Engine(backend_for(device))
        return _ENGINES[device]
