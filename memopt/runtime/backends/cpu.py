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
    """One batch of copies by a worker thread, and its end."""

    def __init__(self, copies: Copies, after: Sequence[Event]) -> None:
        self._copies, self._after = copies, after
        self._flag = threading.Event()
        self._error: str | None = None

    def done(self) -> bool:
        """Tell whether the worker has finished the batch."""
        return self._flag.is_set()

    def wait(self) -> None:
        """Block until the batch is finished; raise what the worker met."""
        self._flag.wait()
        if self._error is not None:
            raise RuntimeError(f"a copy of a swapped tensor failed: {self._error}")

    def run(self, delay_s: float) -> None:
        """Copy, then let go of the tensors and say so."""
        try:
            for earlier in self._after:
                assert isinstance(earlier, ThreadEvent)
                earlier.wait()
            time.sleep(delay_s)
            for source, target in self._copies:
                target.copy_(source)
                del source, target
        except BaseException as error:
            # Whoever waits for the event must see it; as text, since its traceback would hold the graph for ever.
            self._error = str(error) or type(error).__name__
        finally:
            self._copies, self._after = (), ()
            self._flag.set()


Jobs = queue.SimpleQueue[ThreadEvent]


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
        self._out: Jobs | None = None
        self._in: Jobs | None = None

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

    def _submit(self, jobs: Jobs, copies: Copies, after: Sequence[Event]) -> ThreadEvent:
        if self._poison:
            for _, target in copies:
                target.fill_(POISON)
        event = ThreadEvent(tuple(copies), tuple(after))
        jobs.put(event)
        return event

    def _start(self, name: str) -> Jobs:
        jobs: Jobs = queue.SimpleQueue()
        threading.Thread(target=self._work, args=(jobs,), name=name, daemon=True).start()
        return jobs

    def _work(self, jobs: Jobs) -> None:
        while True:
            jobs.get().run(self._delay_s() if self._delay_s is not None else 0)
