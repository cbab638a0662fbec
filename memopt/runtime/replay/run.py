"""The forward of a checkpointed region: drop what is saved, remember how to compute it again."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memopt.ir import OP_POLICIES
from memopt.runtime.counters import Counters
from memopt.runtime.replay.arguments import Arguments
from memopt.runtime.replay.attributes import Attributes, Buffer
from memopt.runtime.replay.frame import Filling, Frame, unpack
from memopt.runtime.replay.hooks import HookRecord
from memopt.runtime.replay.selective import Keeping, Results, Standing
from memopt.runtime.replay.surroundings import Surroundings

Forward = Callable[..., Any]


@dataclass(slots=True)
class Habits:
    """What a region was seen to do. What it writes to is copied at the entry of every further call; at the first, all is."""

    arguments: frozenset[int] | None = None
    buffers: frozenset[Buffer] | None = None
    stops_early: dict[int, bool] = field(default_factory=dict)
    """By the number of saves of a forward, whether its replay may end with the last of them."""
    learns: bool = True
    """Whether the next call finds that out."""


_HABITS: weakref.WeakKeyDictionary[nn.Module, Habits] = weakref.WeakKeyDictionary()


def run_checkpointed(
    module: nn.Module,
    forward: Forward,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    fqn: str,
    policy: str,
    device: torch.device,
    counters: Counters,
) -> Any:
    """Call a region's forward without saving for backward what can be computed again; gradients stay exact."""
    call = _Call(module, forward, args, kwargs, fqn=fqn, policy=policy, device=device, counters=counters)
    return call.run(args, kwargs)


class _Call:
    """One call of a region: all that a replay of it needs."""

    def __init__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        fqn: str,
        policy: str,
        device: torch.device,
        counters: Counters,
    ) -> None:
        self._module = module
        self._forward = forward
        self._fqn = fqn
        self._counters = counters
        self._arguments = Arguments(args, kwargs, torch._C._autograd._top_saved_tensors_default_hooks(True))
        self._attributes = Attributes(module)
        self._surroundings = Surroundings({device, *(leaf.tensor.device for leaf in self._arguments.leaves)})
        self._hooks = HookRecord(module)
        self._results = Results(OP_POLICIES[policy], fqn) if policy != "full" else None

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the forward for the first time."""
        habits = _HABITS.get(self._module) or Habits()
        self._arguments.clone(habits.arguments)
        self._attributes.clone(habits.buffers)
        frame = Frame(self._fqn, learns=habits.learns)
        with (
            self._hooks.recording(),
            torch.autograd.graph.saved_tensors_hooks(frame.pack, unpack),
            Keeping(self._results, frame) if self._results else nullcontext(),
        ):
            output = self._forward(*args, **kwargs)
        self._close(frame, habits)
        return output

    def _close(self, frame: Frame, habits: Habits) -> None:
        self._surroundings.close()
        habits.arguments = (habits.arguments or frozenset()) | self._arguments.close()
        habits.buffers = (habits.buffers or frozenset()) | self._attributes.close()
        if habits.learns:
            habits.stops_early[frame.num_saves] = not frame.fills_late()
        habits.learns = frame.num_saves not in habits.stops_early
        _HABITS[self._module] = habits
        self._counters.checkpointed_calls += 1
        if self._results:
            self._counters.kept_results_bytes += self._results.close(frame.num_saves)
        frame.close(self.replay, stops_early=habits.stops_early.get(frame.num_saves, False))

    def replay(self, filling: Filling) -> None:
        """Run the forward again, its saves going to a filling; nothing else may notice."""
        self._counters.replayed_calls += 1
        self._attributes.check(self._fqn)
        with ExitStack() as stack:
            stack.enter_context(filling.stopping())
            stack.enter_context(self._surroundings.restored())
            stack.enter_context(self._attributes.restored(self._fqn))
            stack.enter_context(self._hooks.replaying())
            stack.enter_context(torch.enable_grad())
            args, kwargs = self._arguments.again(self._fqn)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(filling.pack, _as_it_is))
            if self._results:
                stack.enter_context(Standing(self._results, filling))
            self._forward(*args, **kwargs)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """Return what was packed: a backward inside the region's forward reads it."""
    return tensor
