"""What a training step takes of a device's memory, over its operators."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from memopt.ir.device import DeviceProfile

OPTIMIZERS = ("none", "sgd", "adamw", "adamw-fused")
"""torch's: adamw makes temporary copies as large as the parameters, adamw-fused (the default of transformers' Trainer)
none; sgd has no momentum."""


class Use(Enum):
    """What memory is for."""

    PARAMETERS = "parameters"
    """And buffers."""
    OPTIMIZER = "optimizer state"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    """What forward leaves for backward, and what comes back for it from the host."""
    WORKSPACE = "workspace"
    """What is freed in the same phase, and what backward makes for itself: gradients of activations, replayed tensors."""
    LIBRARIES = "CUDA libraries"
    """What matrix products are given to work in, by torch, once and for all."""


class Phase(Enum):
    """The parts of a training step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The memory that is in use after an operator."""

    total_bytes: int
    uses: tuple[int, ...]
    """Bytes for each Use, in its order."""
    phase: Phase
    module: str
    """Name of the module that runs; in backward, of the one whose forward made the node."""
    op: str
    """The operator; in backward, the autograd node it is called by and the operator."""
    at: int
    """Its number in the step."""

    def bytes_for(self, use: Use) -> int:
        """Return the bytes for one use."""
        return self.uses[tuple(Use).index(use)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """One training step."""

    peak: Moment
    moments: tuple[Moment, ...]
    """The step in short: of every stretch of operators the one with most in use."""
    most: tuple[int, ...]
    """The most bytes that are there for each Use, in its order, at any time."""
    num_operators: int
    compute_us: tuple[tuple[Phase, float], ...]
    """At least how long each phase takes by the device's profile, copies aside: to compute, or to launch what computes."""

    def most_for(self, use: Use) -> int:
        """Return the most bytes that are there for one use."""
        return self.most[tuple(Use).index(use)]

    def us_of(self, phase: Phase) -> float:
        """Return how long a phase takes at least, copies aside."""
        return dict(self.compute_us).get(phase, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A prediction: a step without a plan, and with it."""

    baseline: StepMemory
    planned: tuple[StepMemory, ...]
    """Nothing without a plan; one step where nothing is copied; else two: as if each copy out had ended as soon as it
    began, and as if each ended when the engine waits for it. What a run does lies between."""
    optimizer: str
    grad_in_backward: bool
    accumulate_gradients: bool = False
    """Whether the gradients of earlier batches are there from the start."""
    copied_out_bytes: int
    copied_in_bytes: int
    """At the most: what backward needs before it has left stays."""
    host_pinned_bytes: int
    device: DeviceProfile
    device_memory_bytes: int | None = None
    """What there is, if that was asked."""
    notes: tuple[str, ...] = ()
    """What the prediction does not know."""

    @property
    def planned_low_bytes(self) -> int:
        """The peak with the plan, all copies out having ended at once."""
        return min(self._planned_peaks())

    @property
    def planned_high_bytes(self) -> int:
        """The peak with the plan, with as much on its way out as the engine lets be."""
        return max(self._planned_peaks())

    @property
    def step(self) -> StepMemory:
        """The step that decides: with the plan if there is one, at the higher end."""
        return max(self.planned or (self.baseline,), key=lambda step: step.peak.total_bytes)

    @property
    def copy_out_us(self) -> float:
        """How long copying out takes, one copy after the other."""
        return 1e6 * self.copied_out_bytes / self.device.copy_out_bytes_per_second

    @property
    def copy_in_us(self) -> float:
        """How long copying back in takes."""
        return 1e6 * self.copied_in_bytes / self.device.copy_in_bytes_per_second

    def short_bytes(self, peak_bytes: int) -> int | None:
        """Return how much memory a peak lacks, 0 if it fits; None if that was not asked."""
        if self.device_memory_bytes is None:
            return None
        return max(0, peak_bytes - self.device_memory_bytes)

    def _planned_peaks(self) -> Sequence[int]:
        return [step.peak.total_bytes for step in self.planned or (self.baseline,)]

    @property
    def fits(self) -> bool | None:
        """Whether the step that decides fits the memory that there is; None if that was not asked."""
        if self.device_memory_bytes is None:
            return None
        return self.planned_high_bytes <= self.device_memory_bytes
