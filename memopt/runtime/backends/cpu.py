"""The CPU as a device: worker threads really copy into second buffers, so that every race can be had without a GPU."""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

from memopt.runtime.backends.base import Copies, Event

POISON = 0xFF
"""The byte that fills memory before a copy ends: as floats it is NaN."""

STOP_TIMEOUT_S = 10.0


class ThreadEvent:
    """One batch of copies by a worker thread, and its end."""

    is_captured = False
    origin_id = 0

    def __init__(self, copies: Copies, after: Iterable[Event]) -> None:
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


class CpuBackend:
    """Copy in two worker threads, one each way.

    `delay_s` is asked before each batch for how long to sleep; `poison` fills every target with NaN first. Both are
    there for tests: a missing wait then gives wrong values instead of luck.
    """

    slab_bytes = 16 << 20
    device = torch.device("cpu")

    def __init__(self, *, delay_s: Callable[[], float] | None = None, poison: bool = False) -> None:
        self._poison = poison
        self._workers = tuple(Worker(name, delay_s) for name in ("memopt copy-out", "memopt copy-in"))
        # Also at exit: a thread that still copies while the interpreter goes takes the process down.
        weakref.finalize(self, _stop, self._workers)

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        """Return ordinary memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy_out(self, copies: Copies) -> ThreadEvent:
        """Queue a batch for the copy-out worker."""
        return self._submit(self._workers[0], copies, ())

    def copy_in(self, copies: Copies, after: Iterable[Event]) -> ThreadEvent:
        """Queue a batch for the copy-in worker."""
        return self._submit(self._workers[1], copies, after)

    def is_capturing(self) -> bool:
        """Return False: there are no graphs."""
        return False

    def here(self) -> int:
        """Return 0: whoever waits blocks, and then the copy has ended for all."""
        return 0

    def wait(self, event: Event, target: torch.Tensor) -> None:
        """Block the calling thread until the copy has ended."""
        self.release_after(event)

    def release_after(self, event: Event) -> None:
        """Block the calling thread until the copy has ended."""
        assert isinstance(event, ThreadEvent)
        event.wait()

    def _submit(self, worker: "Worker", copies: Copies, after: Iterable[Event]) -> ThreadEvent:
        if self._poison:
            for _, target in copies:
                target.fill_(POISON)
        event = ThreadEvent(tuple(copies), tuple(after))
        worker.put(event)
        return event


class Worker:
    """A thread that copies batch after batch, begun with the first."""

    def __init__(self, name: str, delay_s: Callable[[], float] | None) -> None:
        self._name = name
        self._delay_s = delay_s
        self._jobs: queue.SimpleQueue[ThreadEvent | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, event: ThreadEvent) -> None:
        """Queue a batch."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(event)

    def stop(self) -> None:
        """Finish what is queued, then end."""
        self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=STOP_TIMEOUT_S)

    def _work(self) -> None:
        while (event := self._jobs.get()) is not None:
            event.run(self._delay_s() if self._delay_s is not None else 0)
            del event


def _stop(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.stop()
