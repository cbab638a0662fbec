"""What is alive after each operator of a step, what for, and how long the operators take."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from memopt.ir import DeviceProfile, Moment, Phase, StepMemory, Use
from memopt.predict.live import LiveBytes

MAX_MOMENTS = 1500
"""How many of them a step is told in."""
_HALVES = (torch.bfloat16, torch.float16)


class Work(NamedTuple):
    """What an operator gives the device to do."""

    flops: int
    num_bytes: int
    is_half: bool


class Timeline:
    """The operators of a step as they run."""

    def __init__(self, live: LiveBytes) -> None:
        self._live = live
        self._places: list[tuple[str, str]] = []
        """(module, node of the backward)."""
        self._operators: list[Any] = []
        self._works: list[Work] = []
        self._phases: list[tuple[int, Phase]] = [(0, Phase.FORWARD)]

    def write(self, place: tuple[str, str], func: Any, args: Any, made: Sequence[torch.Tensor], flops: int) -> None:
        """Write down an operator that has just run."""
        self._places.append(place)
        self._operators.append(func)
        self._works.append(_NONE if func.is_view else Work(flops, _bytes_of(args, made), made[0].dtype in _HALVES))
        self._live.now += 1

    def enter(self, phase: Phase) -> None:
        """Begin the next phase of the step."""
        self._phases.append((len(self._operators), phase))

    @property
    def totals(self) -> list[int]:
        """What is alive after each operator."""
        return list(map(sum, zip(*self._uses(0), strict=True)))

    def step(self, device: DeviceProfile) -> StepMemory:
        """Return the step on a device, in short."""
        uses = self._uses(device.library_bytes)
        totals = list(map(sum, zip(*uses, strict=True)))
        moments = [self._moment(at, uses) for at in _highest(totals)]
        return StepMemory(
            peak=max(moments, key=lambda moment: moment.total_bytes),
            moments=tuple(moments),
            most=tuple(map(max, uses)),
            num_operators=len(self._operators),
            compute_us=tuple(self._times(device)),
        )

    def _uses(self, library_bytes: int) -> list[list[int]]:
        """Return for each Use what is there for it after each operator."""
        changes = {use: [0] * (len(self._operators) + 1) for use in Use}
        for life in self._live.lives:
            changes[life.use][life.made_at] += life.num_bytes
            if life.freed_at is not None:
                changes[life.use][life.freed_at] -= life.num_bytes
        changes[Use.LIBRARIES][0] += library_bytes
        return [list(accumulate(changes[use][:-1])) for use in Use]

    def _moment(self, at: int, uses: list[list[int]]) -> Moment:
        module, node = self._places[at]
        operator = str(self._operators[at]).removesuffix(".default")
        return Moment(
            total_bytes=sum(use[at] for use in uses),
            uses=tuple(use[at] for use in uses),
            phase=self._phase(at),
            module=module,
            op=f"{node} {operator}".lstrip(),
            at=at,
        )

    def _phase(self, at: int) -> Phase:
        return next(phase for first, phase in reversed(self._phases) if first <= at)

    def _times(self, device: DeviceProfile) -> Iterator[tuple[Phase, float]]:
        ends = [first for first, _ in self._phases[1:]] + [len(self._operators)]
        for (first, phase), end in zip(self._phases, ends, strict=True):
            works = self._works[first:end]
            computing = sum(device.compute_us(w.flops, w.num_bytes, is_half=w.is_half) for w in works)
            yield phase, max(computing, device.launch_us * len(works))


def _highest(totals: list[int]) -> Iterator[int]:
    """Yield of every stretch of operators the one after which most is alive."""
    stretch = -(-len(totals) // MAX_MOMENTS)
    for first in range(0, len(totals), stretch):
        yield max(range(first, min(first + stretch, len(totals))), key=totals.__getitem__)


_NONE = Work(0, 0, False)


def _bytes_of(args: Any, made: Sequence[torch.Tensor]) -> int:
    """Return the bytes that an operator reads and writes: those of its operands and of what it makes."""
    operands = (a for arg in args for a in (arg if isinstance(arg, (list, tuple)) else (arg,)))
    return sum(t.numel() * t.element_size() for t in (*operands, *made) if isinstance(t, torch.Tensor))
