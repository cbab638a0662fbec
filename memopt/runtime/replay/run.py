"""The forward of a checkpointed region: drop what is saved, remember how to compute it again."""

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memopt.errors import BackwardInsideError
from memopt.ir import OP_POLICIES
from memopt.runtime.counters import Counters
from memopt.runtime.prediction import alike, predicts
from memopt.runtime.region import Region, habits_of
from memopt.runtime.replay.arguments import Arguments
from memopt.runtime.replay.attributes import Attributes, Buffer, Snapshot
from memopt.runtime.replay.dropping import Dropping
from memopt.runtime.replay.filling import Filling
from memopt.runtime.replay.following import Following
from memopt.runtime.replay.frame import Frame, Handle, tensors_of, unpack
from memopt.runtime.replay.hooks import HookRecord
from memopt.runtime.replay.keeping import Keeping
from memopt.runtime.replay.light import MAX_SHAPES, Learned, LightCall, Shapes, shapes_of
from memopt.runtime.replay.outputs import has_taker, offer_outputs
from memopt.runtime.replay.proof import Record, Samples
from memopt.runtime.replay.recipes import Recipes, Shelf
from memopt.runtime.replay.standing import Standing, Standins
from memopt.runtime.replay.surroundings import Surroundings
from memopt.runtime.replay.watch import Watch

Forward = Callable[..., Any]


@dataclass(slots=True)
class Known:
    """What a region was seen to do. What it writes to is copied at the entry of every further call; at the first, all is."""

    arguments: frozenset[int] | None = None
    buffers: frozenset[Buffer] | None = None
    stops_early: dict[int, bool] = field(default_factory=dict)
    """By the number of saves of a forward, whether its replay may end with the last of them."""
    learns: bool = True
    """Whether the next call finds that out."""
    is_steady: bool = False
    """Whether the last call that was looked at left the modules with all they carried, and found the same."""
    is_proven: bool = False
    """Whether a replay was seen to compute what its forward did."""
    draws: bool = False
    """Whether a part whose output is not kept was seen to draw random numbers."""
    reads_inside: bool = False
    """Whether a backward runs inside of the forward."""
    snapshot: Snapshot | None = None
    recipes: Recipes = field(default_factory=Recipes)
    """Of what a selective call keeps."""
    light: dict[Shapes, Learned] = field(default_factory=dict)
    """Of a part whose output is not kept, once all is known of it: what it saves, by the shapes of its arguments."""
    attributes: Attributes | None = None
    """What its modules carry, as of the last such call."""

    def forget(self) -> None:
        """Learn in the next call."""
        self.arguments = self.buffers = None
        self.stops_early.clear()
        self.recipes = Recipes()
        self.light = {}
        self.attributes = None
        self.learns = True
        self.is_proven = self.draws = False

    def light_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Learned | None:
        """Return what was learned for arguments like these, if a call can rely on it."""
        shapes = shapes_of(args, kwargs)
        learned = None if shapes is None else self.light.get(shapes)
        if learned is None or self.snapshot is None or not self.snapshot.holds() or self.snapshot.hooks.in_use():
            return None
        return learned if has_taker() else None

    def light_attributes(self) -> Attributes:
        """Return what the modules carry now; the calls of a step share it."""
        assert self.snapshot is not None
        if self.attributes is None or not self.attributes.has_parameters_as_then():
            self.attributes = Attributes(self.snapshot)
        return self.attributes

    def learn_light(
        self, snapshot: Snapshot, frame: Frame, outputs: tuple[int, ...], shapes: Shapes | None, num_tensors: int
    ) -> None:
        """Note what a call saved, if all is known of the part: it draws nothing, writes to nothing, and was proven."""
        plain = self.arguments == frozenset() == self.buffers and not snapshot.buffers
        simple = plain and not self.draws and not self.reads_inside
        if shapes is None or not (simple and self.is_proven and outputs):
            return
        looks = list(frame.looks())
        self.light[shapes] = Learned(looks, len(looks) - len(outputs), outputs, num_tensors)
        while len(self.light) > MAX_SHAPES:
            self.light.pop(next(iter(self.light)), None)

    def record(self, parameters: tuple[torch.Tensor, ...], statistics: frozenset[int]) -> Record | None:
        """Return what the next call notes its saves in, None where there is nothing to learn."""
        holds = self.reads_inside or not self.is_proven
        return Record(parameters, statistics, holds=holds) if holds or self.learns else None


def run_checkpointed(
    module: nn.Module,
    region: Region,
    forward: Forward,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    device: torch.device,
    counters: Counters,
) -> Any:
    """Call a region's forward without saving for backward what can be computed again; gradients stay exact."""
    habits = habits_of(module)
    known = habits.known = habits.known or Known()
    learned = known.light_call(args, kwargs) if region.gives_recipes and known.light else None
    if learned is not None:
        attributes, outer = known.light_attributes(), torch._C._autograd._top_saved_tensors_default_hooks(True)
        light = LightCall(module, region.fqn, forward, attributes, counters, known.forget)
        output, is_as_learned = light.run(learned, args, kwargs, outer)
        if not is_as_learned:
            known.forget()
        return output
    call = _Call(module, region, forward, Arguments(args, kwargs), known, device=device, counters=counters)
    return call.run(args, kwargs)


class _Call:
    """One call of a region: all that a replay of it needs."""

    def __init__(
        self,
        module: nn.Module,
        region: Region,
        forward: Forward,
        arguments: Arguments,
        known: Known,
        *,
        device: torch.device,
        counters: Counters,
    ) -> None:
        self._fqn = region.fqn
        self._gives_recipes = region.gives_recipes
        self._module = module
        self._forward = forward
        self._counters = counters
        self._known = known
        snapshot = self._snapshot_of(module)
        self._arguments = arguments
        self._snapshot = snapshot
        self._attributes = Attributes(snapshot, arguments.parameters)
        devices = {device, *(leaf.tensor.device for leaf in arguments.leaves)}
        self._surroundings = Surroundings(devices, (*snapshot.generators, *arguments.generators))
        self._hooks = HookRecord(module, snapshot.hooks)
        self._policy = OP_POLICIES[str(region.policy)]
        self._drawn: list[torch.Tensor] = []
        self._standins: Standins | None = None
        self._samples: Samples | None = None

    def _snapshot_of(self, module: nn.Module) -> Snapshot:
        known, before = self._known, self._known.snapshot
        if before is not None and before.holds():
            return before
        snapshot = Snapshot(module)
        known.is_steady = False
        known.snapshot = snapshot if snapshot.is_lasting else None
        if before is None or not snapshot.resembles(before):
            known.forget()  # another mode, other children: the region may do something else now
        return snapshot

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the forward for the first time."""
        self._arguments.clone(self._known.arguments)
        self._attributes.clone(self._known.buffers)
        record = self._known.record(self._attributes.parameters, self._snapshot.statistics)
        frame = Frame(self._fqn, record)
        watch = self._watch(frame, record)
        with (
            self._hooks.recording(),
            torch.autograd.graph.saved_tensors_hooks(watch.pack, unpack),
            watch.active(),
        ):
            output = self._forward(*args, **kwargs)
        self._drawn = self._surroundings.drawn()
        self._close(frame, watch, record)
        if self._gives_recipes:
            self._known.draws |= self._surroundings.have_moved()
            outputs = offer_outputs(
                frame, output, self._arguments, self._snapshot.tensors(), is_proven=self._samples is None
            )
            self._known.learn_light(self._snapshot, frame, outputs, shapes_of(args, kwargs), len(tensors_of(output)))
        return output

    def _watch(self, frame: Frame, record: Record | None) -> Watch:
        policy, known = self._policy, self._known
        pack: Callable[[torch.Tensor], Handle] = frame.pack_and_record if record else frame.pack
        if known.reads_inside or not (policy.always or policy.alternate):
            return Dropping(frame, pack)
        shelf = Shelf(known.recipes, (self._arguments.looks(), self._surroundings.looks()), self._snapshot.modules())
        if record or shelf.recipe is None:
            return Keeping(policy, frame, shelf, pack)
        return Following(shelf.recipe, policy, frame, shelf)

    def _close(self, frame: Frame, watch: Watch, record: Record | None) -> None:
        known = self._known
        written = self._arguments.close(learns=known.arguments is None)
        known.arguments = written | (known.arguments or frozenset())
        if known.buffers is None or not known.is_steady:
            known.is_steady = self._attributes.settle()
            self._snapshot = self._attributes.snapshot
        changed = self._attributes.close(learns=known.buffers is None)
        known.buffers = changed | (known.buffers or frozenset())
        ended = watch.close()
        self._standins = ended.standins
        if record:
            self._learn(frame, record)
        self._counters.checkpointed_calls += 1
        self._counters.kept_results_bytes += ended.num_bytes if self._standins else 0
        known.learns = frame.num_saves not in known.stops_early
        stops_early = known.stops_early.get(frame.num_saves, False)
        frame.close(self, last_needed=ended.num_needed - 1 if stops_early else None)

    def _learn(self, frame: Frame, record: Record) -> None:
        """Note what the saves of this call tell of the next ones, and what its own replay has to compute."""
        known = self._known
        if known.learns:
            known.stops_early[frame.num_saves] = not record.fills_late()
        if record.was_read:
            self._allow_backward_inside(frame, record)
        known.is_proven |= predicts()  # there are no values to hold against each other
        if not known.is_proven:
            self._samples = record.samples(frame.released)

    def _allow_backward_inside(self, frame: Frame, record: Record) -> None:
        """Keep no results: they have no graph, through which the backward goes in the replay too."""
        if record.adds_to_grads():
            raise BackwardInsideError(
                self._fqn, "adds to .grad, as the replay would do again: call torch.autograd.grad"
            )
        self._known.reads_inside = True
        self._standins = None
        frame.drop_all()

    def check(self) -> None:
        """Raise SavedTensorModifiedError or ReplayError if a parameter is not what the forward used."""
        self._attributes.check_parameters(self._fqn)

    def replay(self, filling: Filling) -> None:
        """Run the forward again, its saves going to a filling; nothing else may notice."""
        self._counters.replayed_calls += 1
        self._attributes.check_buffers(self._fqn)
        with ExitStack() as stack:
            stack.enter_context(self._surroundings.restored())
            stack.enter_context(self._attributes.restored())
            stack.enter_context(self._hooks.replaying())
            stack.enter_context(torch.enable_grad())
            args, kwargs = self._arguments.again(self._fqn)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(filling.pack, _as_it_is))
            if self._standins:
                stack.enter_context(Standing(self._standins, filling))
            filling.run(functools.partial(self._forward, *args, **kwargs))
        if self._samples:
            self._samples.check(self._fqn, filling.frame.computed())
            self._samples = None
            self._known.is_proven = True

    def has_drawn(self) -> bool:
        """Tell whether torch's random streams have come as far as at the end of the forward."""
        return all(map(alike, self._surroundings.drawn(), self._drawn))


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """Return what was packed: a backward inside the region's forward reads it."""
    return tensor
