"""Further calls of a part of which all is known: a norm or an activation, that takes tensors and gives out tensors.

Such parts are many and short: what a region in general has to note in every call would take longer than they do. Once
a call was seen to draw no random numbers and to write to nothing, and its replay to compute what it did, only what may
still differ between a forward and its backward is noted.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import skip_code

from memopt.errors import ReplayError
from memopt.operands import TENSORS
from memopt.runtime.counters import Counters
from memopt.runtime.replay.arguments import Hooks, versions_of
from memopt.runtime.replay.attributes import Attributes
from memopt.runtime.replay.filling import Filling
from memopt.runtime.replay.frame import ANY, Frame, Handle, tensors_of, unpack
from memopt.runtime.replay.hooks import HookRecord, has_hooks
from memopt.runtime.replay.outputs import offer
from memopt.runtime.replay.random_streams import global_streams
from memopt.runtime.replay.surroundings import Looks

_ATOMS = (bool, int, float, str, torch.dtype, type(None))
MAX_SHAPES = 64
"""For how many shapes of its arguments a part keeps what it has learned."""

Shapes = tuple[Any, ...]


class Learned:
    """What a part does with arguments of one shape: the looks of its saves and its outputs, in order."""

    __slots__ = ("looks", "num_saves", "num_tensors", "outputs")

    def __init__(self, looks: list[int], num_saves: int, outputs: tuple[int, ...], num_tensors: int) -> None:
        self.looks = looks
        self.num_saves = num_saves
        self.outputs = outputs
        """Which of the tensors that it returns are its own."""
        self.num_tensors = num_tensors
        """How many it returns."""


class LightFrame(Frame):
    """The saves of one call, of which only the number is new."""

    def __init__(self, fqn: str, learned: Learned) -> None:
        super().__init__(fqn)
        self._learned = learned
        self._looks = learned.looks
        self._count = 0

    def pack(self, tensor: torch.Tensor) -> Handle:
        """Drop one saved tensor: the hook that autograd calls in the part's forward."""
        self._count += 1
        return Handle(self, self._count - 1)

    def is_as_learned(self) -> bool:
        """Tell whether the forward saved as much as it did when it was learned; if not, what it saved is not known."""
        if self._count == self._learned.num_saves:
            return True
        self._looks = [ANY] * (self._count + len(self._learned.outputs))
        return False


def shapes_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Shapes | None:
    """Return what the arguments look like, and what is switched on around; None for more than tensors and plain values."""
    described: list[Any] = [Looks.now()]
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) in TENSORS and not value.is_inference():
            described += (value.shape, value.dtype, value.requires_grad, value.stride())
        elif type(value) in _ATOMS:
            described.append(value)
        else:
            return None
    return (*described, *kwargs) if kwargs else tuple(described)


class LightCall:
    """One call of a part of which all is known."""

    __slots__ = (
        "_args", "_attributes", "_counters", "_forget", "_forward", "_fqn", "_has_written", "_kwargs", "_looks", "_module",
    )  # fmt: skip

    def __init__(
        self,
        module: nn.Module,
        fqn: str,
        forward: Callable[..., Any],
        attributes: Attributes,
        counters: Counters,
        forget: Callable[[], None],
    ) -> None:
        self._forget = forget
        self._module = module
        self._fqn = fqn
        self._forward = forward
        self._attributes = attributes
        self._counters = counters
        self._looks = Looks.now()

    def run(self, learned: Learned, args: tuple[Any, ...], kwargs: Mapping[str, Any], outer: Hooks) -> tuple[Any, bool]:
        """Run the forward; return what it returns, and whether it did what was learned."""
        frame = LightFrame(self._fqn, learned)
        versions = _versions(args, kwargs)
        with torch.autograd.graph.saved_tensors_hooks(frame.pack, unpack):
            output = self._forward(*args, **kwargs)
        self._has_written = versions != _versions(args, kwargs)
        self._args = [_Packed.of(value, outer) for value in args]
        self._kwargs = {name: _Packed.of(value, outer) for name, value in kwargs.items()}
        tensors = [output] if isinstance(output, torch.Tensor) else tensors_of(output)
        is_as_learned = frame.is_as_learned() and len(tensors) == learned.num_tensors and not self._has_written
        frame.close(self, last_needed=None)
        self._counters.checkpointed_calls += 1
        if is_as_learned:
            offer(frame, tensors, learned.outputs, outer)
        return output, is_as_learned

    def check(self) -> None:
        """Raise SavedTensorModifiedError or ReplayError if a parameter, or an argument, is not what the forward used."""
        self._attributes.check_parameters(self._fqn)
        if self._has_written:
            raise ReplayError(
                self._fqn, "needs an argument as it was, which the forward wrote to, as no call before did"
            )

    def has_drawn(self) -> bool:
        """Return True: nothing is drawn."""
        return True

    def replay(self, filling: Filling) -> None:
        """Run the forward again, its saves going to a filling."""
        self._counters.replayed_calls += 1
        args = [value.value() if type(value) is _Packed else value for value in self._args]
        kwargs = {name: value.value() if type(value) is _Packed else value for name, value in self._kwargs.items()}
        before = global_streams()
        with (
            self._as_then(),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(filling.pack, _as_it_is),
        ):
            filling.run(lambda: self._forward(*args, **kwargs))
        if global_streams() != before:
            self._forget()
            raise ReplayError(self._fqn, "draws random numbers, as no call before did: it cannot be made again")

    @contextmanager
    def _as_then(self) -> Iterator[None]:
        """Put back for a while what has changed since the forward; nearly always that is nothing."""
        with ExitStack() as stack:
            if (now := Looks.now()) != self._looks:
                stack.enter_context(self._looks.restored(now))
            if not self._attributes.are_as_then():
                stack.enter_context(self._attributes.restored())
            if has_hooks(self._module):
                stack.enter_context(HookRecord(self._module).replaying())
            yield


class _Packed:
    """A tensor that a part was called with, left to what sees to the saves around it."""

    __slots__ = ("_handle", "_needs_grad", "_unpack")

    def __init__(self, tensor: torch.Tensor, outer: Hooks) -> None:
        self._handle = outer[0](tensor.detach())
        self._unpack = outer[1]
        self._needs_grad = tensor.requires_grad

    @staticmethod
    def of(value: Any, outer: Hooks) -> Any:
        """Return a value as it is kept: tensors packed."""
        return _Packed(value, outer) if type(value) in TENSORS else value

    def value(self) -> torch.Tensor:
        """Return the tensor as the part met it."""
        return self._unpack(self._handle).detach().requires_grad_(self._needs_grad)


def _versions(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int]:
    values = (*args, *kwargs.values()) if kwargs else args
    return versions_of([value for value in values if type(value) in TENSORS])


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


skip_code(LightFrame.pack.__code__)  # a module that is compiled inside a region calls it: it is nothing to compile
