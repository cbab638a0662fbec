"""What the flags ask for: a configuration, passes, an input."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

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
class PlanRequest:
    """The plan that the flags ask for: one that was saved, or a configuration and passes to make one."""

    plan: Plan | None = None
    config: Config = field(default_factory=Config)
    passes: tuple[Pass, ...] = ()

    @classmethod
    def of(
        cls, *, config: Path | None, plan: Path | None, swap: Literal["none", "attention"] | None, passes: str | None
    ) -> "PlanRequest":
        """Read what the flags name; raises RequestError unless there is a plan, or a configuration or passes."""
        if plan is not None:
            if config or swap or passes is not None:
                raise RequestError("--plan holds all decisions; give it without --config, --swap and --passes")
            return cls(plan=load_plan(plan))
        if not (config or swap) and passes is None:
            raise RequestError("what to apply? give one of --config FILE, --plan PLAN.json and --swap attention")
        chosen = make_config(config, swap)
        return cls(config=chosen, passes=make_passes(passes, chosen, said_none=who_said_none(config, swap)))


def make_config(path: Path | None, swap: Literal["none", "attention"] | None) -> Config:
    """Return the configuration of a file, its swap outranked by the flag."""
    config = load_config(path) if path else Config()
    return replace(config, activation_swap=swap) if swap else config


def who_said_none(path: Path | None, swap: Literal["none", "attention"] | None) -> str | None:
    """Return the flag by which a configuration that swaps nothing was asked for; None where no flag did."""
    return f"--swap {swap}" if swap else f"--config {path}" if path else None


def make_passes(names: str | None, config: Config, *, said_none: str | None) -> tuple[Pass, ...]:
    """Return the passes that the flag names, else those that the configuration asks for; raises RequestError.

    `said_none` is who said that nothing is to be swapped, None where that is only the default.
    """
    asked = passes_for(config)
    if names is None:
        return tuple(map(make_pass, asked))
    passes = parse_passes(names)
    if not passes:
        raise IllegalValueError("passes", names, ", ".join(PASSES))
    _check_order([pass_.name for pass_ in passes])
    if said_none and not asked and any(pass_.name != _CHAIN for pass_ in passes):
        raise RequestError(f"--passes {names} contradicts {said_none}, which swaps nothing; leave out one of them")
    return passes


def _check_order(names: list[str]) -> None:
    """Refuse a chain that is made before anything is decided."""
    if _CHAIN in names and any(name != _CHAIN for name in names[names.index(_CHAIN) :]):
        later = [name for name in names if name != _CHAIN]
        raise RequestError(
            f"--passes {','.join(names)}: {_CHAIN} chains what was decided before it; give {','.join([*later, _CHAIN])}"
        )
