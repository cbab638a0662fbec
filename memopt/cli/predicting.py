"""What memopt-analyze is asked to predict, and the prediction."""

import gc
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from memopt.errors import IllegalValueError, MemoptError, PredictionError, RequestError
from memopt.ir import DeviceProfile, Memory, Plan, find_device
from memopt.report import check_picture
from memopt.units import SIZES, parse_bytes

if TYPE_CHECKING:
    from memopt.cli.models import Source
    from memopt.cli.request import InputRequest

TRAINER_OPTIMIZER = "adamw-fused"
"""What transformers' Trainer takes unless it is told otherwise."""
DEFAULT_DEVICE = "h200"


@dataclass(frozen=True, kw_only=True)
class PredictionFlags:
    """The flags that only a prediction heeds, as they were given."""

    optimizer: Literal["adamw", "adamw-fused", "sgd", "none"] | None
    grad_in_backward: bool
    accumulate_gradients: bool
    device_memory: str | None
    device_profile: str | None

    def given(self) -> tuple[str, ...]:
        """Return the flags as they were written."""
        values = ((f"--{field.name.replace('_', '-')}", getattr(self, field.name)) for field in fields(self))
        return tuple(flag if value is True else f"{flag} {value}" for flag, value in values if value)


@dataclass(frozen=True, kw_only=True)
class PredictionRequest:
    """The step that is to be predicted."""

    optimizer: str
    grad_in_backward: bool
    accumulate_gradients: bool
    device: DeviceProfile
    device_memory_bytes: int | None

    @classmethod
    def of(cls, flags: PredictionFlags) -> "PredictionRequest":
        """Read the flags; raises RequestError."""
        if flags.grad_in_backward and flags.accumulate_gradients:
            raise RequestError(
                "--grad-in-backward drops the gradients that --accumulate-gradients adds up; give one of them"
            )
        return cls(
            optimizer=flags.optimizer or TRAINER_OPTIMIZER,
            grad_in_backward=flags.grad_in_backward,
            accumulate_gradients=flags.accumulate_gradients,
            device=find_device(flags.device_profile or DEFAULT_DEVICE),
            device_memory_bytes=_size(flags.device_memory),
        )

    def predicted(self, plan: Plan, source: "Source", given: "InputRequest") -> Memory:
        """Predict a step of the model that the plan was made for, traced on an input; raises MemoptError."""
        import memopt

        gc.freeze()  # the libraries and the trace stay until the command ends: a tenth of the time went into looking again
        return memopt.predict(
            plan,
            source.config if source.live is None else source.live,
            optimizer=self.optimizer,
            grad_in_backward=self.grad_in_backward,
            accumulate_gradients=self.accumulate_gradients,
            dtype=given.dtype,
            device=self.device,
            device_memory_bytes=self.device_memory_bytes,
        )


def predict_or_note(
    request: PredictionRequest | None, plan: Plan, source: "Source", given: "InputRequest"
) -> tuple[Plan, Memory | None]:
    """Return the prediction, if one is wanted; where it fails the plan gets the reason as a note."""
    if request is None:
        return plan, None
    try:
        return plan, request.predicted(plan, source, given)
    except RequestError:
        raise
    except MemoptError as error:
        named = isinstance(error, PredictionError)
        return plan.note(str(error) if named else f"the memory of a step is not predicted: {error}"), None


def prediction_request(
    flags: PredictionFlags, *, predict: bool, list_regions: bool, format: str
) -> PredictionRequest | None:
    """Return what is to be predicted, None for nothing; raises RequestError for flags that then have no meaning."""
    if predict and not list_regions:
        if format == "html":
            check_picture()
        return PredictionRequest.of(flags)
    if given := flags.given():
        flag = "--list-regions" if list_regions else "--no-predict"
        raise RequestError(f"{flag} predicts nothing; give it without {' and '.join(given)}")
    return None


def _size(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_bytes(text)
    except ValueError:
        raise IllegalValueError("device_memory", text, SIZES) from None
