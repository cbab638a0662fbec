"""The CPU as a device: worker threads really copy into second buffers, so that every race can be had without a GPU."""

import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch

from memopt.runtime.backends.base import Copies, Event

POISON = 0xFF
"""The byte that fills memory before a copy ends: as floats it is NaN."""


class ThreadEvent:
    """The end of one batch of copies by a worker thread."""

    def __init__(self) -> None:
        self._flag = threading.Event()
        self.error: BaseException | None = None

    def done(self) -> bool:
        """Tell whether the worker has finished the batch."""
        return self._flag.is_set()

    def finish(self) -> None:
        """Say that the batch is finished."""
        self._flag.set()

    def wait(self) -> None:
        """Block until the batch is finished; raise what the worker met."""
        self._flag.wait()
        if self.error is not None:
            raise self.error


Job = tuple[Copies, Sequence[Event], ThreadEvent]


class CpuBackend:
    """Copy in two worker threads, one each way.

    `delay_s` is asked before each batch for how long to sleep; `poison` fills every target with NaN first. Both are
    there for tests: a missing wait then gives wrong values instead of luck.
    """

    slab_bytes = 16 << 20
    device = torch.device("cpu")

    def __init__(self, *, delay_s: Callable[[], float] | None = None, poison: bool = False) -> None:
        self._delay_s = delay_s
        self._poison = poison
        self._out: queue.SimpleQueue[Job] | None = None
        self._in: queue.SimpleQueue[Job] | None = None

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        """Return ordinary memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy_out(self, copies: Copies) -> ThreadEvent:
        """Queue a batch for the copy-out worker."""
        self._out = self._out or self._start("memopt copy-out")
        return self._submit(self._out, copies, ())

    def copy_in(self, copies: Copies, after: Sequence[Event]) -> ThreadEvent:
        """Queue a batch for the copy-in worker."""
        self._in = self._in or self._start("memopt copy-in")
        return self._submit(self._in, copies, after)

    def wait(self, event: Event) -> None:
        """Block the calling thread until the copy has ended."""
        assert isinstance(event, ThreadEvent)
        event.wait()

    def release_after(self, event: Event) -> None:
        """Block the calling thread until the copy has ended."""
        self.wait(event)

    def _submit(self, jobs: "queue.SimpleQueue[Job]", copies: Copies, after: Sequence[Event]) -> ThreadEvent:
        event = ThreadEvent()
        if self._poison:
            for _, target in copies:
                target.fill_(POISON)
        jobs.put((tuple(copies), tuple(after), event))
        return event

    def _start(self, name: str) -> "queue.SimpleQueue[Job]":
        jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        threading.Thread(target=self._work, args=(jobs,), name=name, daemon=True).start()
        return jobs

    def _work(self, jobs: "queue.SimpleQueue[Job]") -> None:
        while True:
            self._run(*jobs.get())

    def _run(self, copies: Copies, after: Sequence[Event], event: ThreadEvent) -> None:
        try:
            for earlier in after:
                self.wait(earlier)
            if self._delay_s is not None:
                time.sleep(self._delay_s())
            for source, target in copies:
                target.copy_(source)
        except BaseException as error:  # whoever waits for the event must see it
            event.error = error
        finally:
            event.finish()
