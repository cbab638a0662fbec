"""The sections of a configuration: keys that belong together, as a mapping in YAML and in keywords."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, TypeVar

from memopt.errors import IllegalValueError, UnknownNameError
from memopt.ir.offload import DEFAULT_MIN_ELEMENTS
from memopt.ir.offload_request import (
    check_count,
    check_fraction,
    check_inflight,
    check_margin,
    offload_names,
    recompute_names,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationOffload:
    """Which parts of each layer go to pinned host memory."""

    modules: tuple[str, ...]
    """Regions, and ``module:PATTERN``; a list, or one string with commas."""
    min_tensor_elements: int = DEFAULT_MIN_ELEMENTS
    """Smaller tensors stay. A count of elements, not of bytes."""
    fraction: float = 1.0
    """Of the groups, how many leave; the last stay."""
    max_inflight: int | None = None
    """How many layers may be on their way out before the computation waits for the oldest."""
    pp_rank_delta_bytes: int = 0
    """Pipeline rank r keeps r times as much."""
    margin: int | Literal["auto"] = "auto"
    """What stays at the end: the last group of each region, or the last groups within so many bytes."""

    def __post_init__(self) -> None:
        key = "activation_offload"
        object.__setattr__(self, "modules", offload_names(f"{key}.modules", self.modules))
        check_count(f"{key}.min_tensor_elements", self.min_tensor_elements)
        check_fraction(f"{key}.fraction", self.fraction)
        check_inflight(f"{key}.max_inflight", self.max_inflight)
        check_count(f"{key}.pp_rank_delta_bytes", self.pp_rank_delta_bytes)
        check_margin(f"{key}.margin", self.margin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Which parts of each layer are computed a second time in backward."""

    modules: tuple[str, ...]
    """A list, or one string with commas."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", recompute_names("recompute.modules", self.modules))


Section = TypeVar("Section", ActivationOffload, Recompute)


def section_of(key: str, cls: type[Section], value: Any) -> Section | None:
    """Return a section, made of a mapping if it is one; raises UnknownNameError and IllegalValueError."""
    if value is None or isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise IllegalValueError(key, value, f"a mapping, for example {{modules: [{_EXAMPLES[key]}]}}")
    make: Callable[..., Section] = cls
    defaults = {field.name: field.default for field in fields(cls)}
    for name in value:
        if name not in defaults:
            raise UnknownNameError(f"key of {key}", str(name), defaults)
    given = {name: defaults[name] if one is None else one for name, one in value.items()}
    if given.get("modules", MISSING) is MISSING:
        given["modules"] = ()  # which is an error that names the legal ones
    return make(**given)


_EXAMPLES = {"activation_offload": "core_attn, attn_proj", "recompute": "layernorm"}
