"""One call of a checkpointed region: what it dropped, and how that is computed again.

Autograd holds a handle for each saved tensor. Thousands of them live at the end of a forward, and Python's collector
looks at every one, so that they are as bare as can be: what there is to know lies in the frame, by position.
"""

import threading
import weakref
from typing import Any, Protocol

import torch
from torch._dynamo.eval_frame import skip_code
from torch.utils._pytree import tree_leaves

from memopt.errors import BackwardInsideError, ReplayError
from memopt.runtime.replay.filling import Filling
from memopt.runtime.replay.proof import Record, described, look_of

ANY = 0
"""The look of a save of which nothing is known."""
_NO_BACKWARD = -1
"""What torch calls the number of the backward where there is none."""


class Again(Protocol):
    """What runs a region's forward a second time."""

    def check(self) -> None:
        """Raise SavedTensorModifiedError or ReplayError if a parameter is not what the forward used."""

    def has_drawn(self) -> bool:
        """Tell, in a replay, whether it has drawn all random numbers that the forward did."""

    def replay(self, filling: Filling) -> None:
        """Run the forward again, its saves going to a filling."""


class Guard(Protocol):
    """What knows whether a tensor that was kept is still what it was."""

    def is_valid(self) -> bool:
        """Tell whether nobody has written to it."""


class Handle:
    """What autograd holds in the place of a saved tensor; what is computed again for it dies with it."""

    __slots__ = ("frame", "position")

    def __init__(self, frame: "Frame", position: int) -> None:
        self.frame = frame
        self.position = position

    def __del__(self) -> None:
        self.frame.release(self.position)


class Frame:
    """The saves of one region in one forward call. Handles own it, and it knows them by position only."""

    def __init__(self, fqn: str, record: Record | None = None) -> None:
        self.fqn = fqn
        self._record = record
        """What is saved, while the forward of a call that learns runs."""
        self._looks: list[int] = []
        self._values: list[torch.Tensor | None] = []
        self._guards: dict[int, Guard] = {}
        """Of the values that were kept, and not computed again."""
        self._released: set[int] = set()
        self._again: Again | None = None
        self._backward = _NO_BACKWARD
        """Which backward is in the region; one that failed leaves its number here, and no other has that."""
        self._computed: set[int] = set()
        self._last_needed: int | None = None
        self._outputs: dict[int, int] = {}
        """Position -> which of the tensors that the forward returned; these come after those of the saves."""
        self._versions: dict[int, int] = {}
        """Of outputs, as the last replay made them."""
        self._lock = threading.RLock()

    @property
    def num_saves(self) -> int:
        """How many tensors the forward saved so far."""
        return len(self._looks)

    def looks(self) -> list[int]:
        """Return what the saves look like, in order: equal numbers stand for equal shapes and types."""
        return self._looks

    @property
    def released(self) -> set[int]:
        """The positions that nobody wants any more."""
        return self._released

    def pack(self, tensor: torch.Tensor) -> Handle:
        """Drop one saved tensor: the hook that autograd calls in the region's forward."""
        looks = self._looks
        looks.append(hash((tensor.shape, tensor.dtype)))
        return Handle(self, len(looks) - 1)

    def pack_and_record(self, tensor: torch.Tensor) -> Handle:
        """Drop one saved tensor when the forward has ended."""
        assert self._record is not None
        handle = self.pack(tensor)
        self._record.note(tensor, self._looks[handle.position])
        return handle

    def keep(self, position: int, tensor: torch.Tensor, guard: Guard) -> None:
        """Hold a saved tensor, which then need not be computed again."""
        if position not in self._released:
            self._make_room()
            self._values[position] = tensor
            self._guards[position] = guard

    def drop(self, position: int) -> None:
        """Leave a tensor that was kept to the replay."""
        if self._guards.pop(position, None) is not None:
            self._values[position] = None

    def drop_all(self) -> None:
        """Leave everything that was kept to the replay."""
        for position in list(self._guards):
            self.drop(position)

    def guard_of(self, position: int) -> Guard | None:
        """Return what guards a kept tensor that is still wanted."""
        return self._guards.get(position)

    def release(self, position: int) -> None:
        """Note that nobody wants a saved tensor any more. May run in any thread, even inside the collector."""
        self._released.add(position)
        if position < len(self._values):
            self._values[position] = None
        self._guards.pop(position, None)

    def close(self, again: Again, *, last_needed: int | None) -> None:
        """Note how to replay the region, now that its forward has ended.

        With the save `last_needed` a replay may end at once; None where an operation may fill it after that.
        """
        self._record = None
        self._make_room()
        self._again = again
        self._last_needed = last_needed

    def offer(self, output: torch.Tensor, number: int) -> Handle:
        """Return a handle for one of the tensors that the forward has returned, once the frame is closed."""
        handle = self.pack(output)
        self._outputs[handle.position] = number
        return handle

    def is_output(self, position: int) -> bool:
        """Tell whether a position is that of an output; a replay may save more than the forward did."""
        return position in self._outputs

    def fill_outputs(self, output: Any) -> None:
        """Take what a replay has returned."""
        if self._outputs:
            tensors = tensors_of(output)
            for position, number in self._outputs.items():
                self.fill(position, tensors[number])
                self._versions[position] = tensors[number]._version

    def version_of(self, position: int) -> int:
        """Return the version of an output when a replay had made it."""
        return self._versions[position]

    def value_of(self, position: int) -> torch.Tensor:
        """Return a saved tensor, computed again with all that is missing around it."""
        with self._lock:
            if self._record is not None:
                return self._record.read(self.fqn, position)
            self._make_room()
            task = torch._C._current_graph_task_id()
            if task == _NO_BACKWARD or task != self._backward:
                self._begin(task)
            if (guard := self._guards.get(position)) is not None and not guard.is_valid():
                self.drop(position)
            if self._values[position] is None:
                self._fill()
            value = self._values[position]
            if value is None:
                raise ReplayError(self.fqn, "saved less than the forward did")
            return value

    def fill(self, position: int, tensor: torch.Tensor) -> None:
        """Take the tensor of a replay; raises ReplayError if it is not like the one that was dropped."""
        if self._looks[position] != ANY and hash((tensor.shape, tensor.dtype)) != self._looks[position]:
            found, expected = described(tensor.shape, tensor.dtype), look_of(self._looks[position])
            raise ReplayError(self.fqn, f"saved {found} where the forward saved {expected}")
        if position not in self._released:
            self._values[position] = tensor.detach()

    def computed(self) -> dict[int, torch.Tensor]:
        """Return what was computed again in this backward, by position."""
        return {n: value for n in self._computed if (value := self._values[n]) is not None}

    def _make_room(self) -> None:
        self._values += [None] * (len(self._looks) - len(self._values))

    def _begin(self, backward: int) -> None:
        """Look at the parameters when backward comes to the region: an optimizer may step in backward, one by one."""
        if self._again is None:
            raise BackwardInsideError(self.fqn, "did not in its first call: let every call do so")
        self._again.check()
        self.end()
        if backward != _NO_BACKWARD:
            self._backward = backward
            ref = weakref.ref(self)  # what the region was called with shall go with its last handle
            torch.autograd.Variable._execution_engine.queue_callback(lambda: _end(ref))  # type: ignore[attr-defined]

    def _fill(self) -> None:
        assert self._again is not None
        missing = {n for n, value in enumerate(self._values) if value is None and n not in self._released}
        self._computed |= missing
        self._again.replay(Filling(self, missing, self._last_needed, self._again.has_drawn))

    def end(self) -> None:
        """Drop what this backward has computed and, with retain_graph, may not be the last to read."""
        self._backward = _NO_BACKWARD
        for position in self._computed:
            self._values[position] = None
        self._computed.clear()


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Return the tensors in what a forward has returned, in order."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _end(ref: "weakref.ref[Frame]") -> None:
    if (frame := ref()) is not None:
        frame.end()


def unpack(handle: Handle) -> torch.Tensor:
    """Return what a handle stands for: the hook that autograd calls in backward."""
    return handle.frame.value_of(handle.position)


for _hook in (Frame.pack, Frame.pack_and_record, unpack):
    skip_code(_hook.__code__)  # a module that is compiled inside a region calls them: they are nothing to compile
