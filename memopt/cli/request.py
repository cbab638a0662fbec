"""What the flags ask for: a configuration, passes, an input."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from memopt.config import Config, load_config, passes_for
from memopt.errors import IllegalValueError, RequestError
from memopt.ir import Plan, TraceInput, load_plan
from memopt.passes import PASSES, Pass, PrefetchChain, make_pass, parse_passes
from memopt.presets import DefaultInput

_CHAIN = PrefetchChain.name


@dataclass(frozen=True, kw_only=True)
class InputRequest:
    """The input that the flags ask for; None where they are silent."""

    batch_size: int | None
    seq_length: int | None
    dtype: str | None
    autocast: str | None
    attn_implementation: str | None

    def over(self, default: DefaultInput, planned: TraceInput | None = None) -> "InputRequest":
        """Return this request; where it is silent, with a plan's input, and without one with a model's defaults."""
        return InputRequest(
            batch_size=self.batch_size or (planned or default).batch_size,
            seq_length=self.seq_length or (planned or default).seq_length,
            dtype=self.dtype or (planned or default).dtype,
            autocast=self.autocast or (planned.autocast if planned else "none"),
            attn_implementation=self.attn_implementation or (planned.attn_implementation if planned else "sdpa"),
        )


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags that stand for a configuration."""

    config: Path | None = None
    swap: Literal["none", "attention"] | None = None
    checkpoint: Literal["off", "full", "selective"] | None = None
    offload: str | None = None
    recompute: str | None = None

    def __bool__(self) -> bool:
        return bool(self.given())

    def given(self) -> tuple[str, ...]:
        """Return the flags as they were written."""
        values = ((f"--{field.name}", getattr(self, field.name)) for field in fields(self))
        return tuple(f"{flag} {value}" for flag, value in values if value is not None)

    def chosen(self) -> Config:
        """Return the configuration of the file, outranked by the other flags."""
        config = load_config(self.config) if self.config else Config()
        return replace(
            config,
            activation_swap=self.swap or config.activation_swap,
            activation_checkpoint=self.checkpoint or config.activation_checkpoint,
            activation_offload=_with_modules(config.activation_offload, self.offload),
            recompute=_with_modules(config.recompute, self.recompute),
        )


def _with_modules(section: Any, modules: str | None) -> Any:
    """Return a section of the file, outranked by a flag that lists modules."""
    if modules is None:
        return section
    return replace(section, modules=modules) if section else {"modules": modules}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The plan that the flags ask for: one that was saved, or passes to make one."""

    plan: Plan | None = None
    passes: tuple[Pass, ...] = ()

    @classmethod
    def of(cls, flags: Flags, *, plan: Path | None, passes: str | None) -> "PlanRequest":
        """Read what the flags name; raises RequestError unless there is a plan, or a configuration or passes."""
        if plan is not None:
            if flags or passes is not None:
                raise RequestError(
                    "--plan holds all decisions; give it without --config, --swap, --checkpoint, --offload, --recompute "
                    "and --passes"
                )
            return cls(plan=load_plan(plan))
        if not flags and passes is None:
            raise RequestError(
                "what to apply? give one of --config FILE, --plan PLAN.json, --passes LIST, --swap attention, "
                "--offload core_attn, --recompute layernorm and --checkpoint full"
            )
        return cls(passes=make_passes(passes, flags))


def make_passes(names: str | None, flags: Flags) -> tuple[Pass, ...]:
    """Return the passes that `names` lists, else those that the configuration asks for; raises RequestError."""
    asked = passes_for(flags.chosen())
    if names is None:
        return tuple(map(make_pass, asked))
    if flags:
        given = " and ".join(flags.given())
        raise RequestError(f"--passes lists all that is done; give it without {given}")
    passes = parse_passes(names)
    if not passes:
        raise IllegalValueError("passes", names, ", ".join(PASSES))
    _check_order([text.strip() for text in names.split(",") if text.strip()])
    return passes


def _check_order(names: list[str]) -> None:
    """Refuse a chain that is made before anything is decided."""
    if _CHAIN in names and any(name != _CHAIN for name in names[names.index(_CHAIN) :]):
        later = [name for name in names if name != _CHAIN]
        raise RequestError(
            f"--passes {','.join(names)}: {_CHAIN} chains what was decided before it; give {','.join([*later, _CHAIN])}"
        )
