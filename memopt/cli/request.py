"""What the flags ask for: a configuration, passes, an input."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from memopt.config import Config, load_config, passes_for
from memopt.errors import RequestError
from memopt.ir import Plan, TraceInput, load_plan
from memopt.passes import Pass, make_pass, parse_passes
from memopt.presets import DefaultInput


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
            if config or swap or passes:
                raise RequestError("--plan holds all decisions; give it without --config, --swap and --passes")
            return cls(plan=load_plan(plan))
        if not (config or swap or passes):
            raise RequestError("what to apply? give one of --config FILE, --plan PLAN.json and --swap attention")
        chosen = make_config(config, swap)
        return cls(config=chosen, passes=make_passes(passes, chosen))


def make_config(path: Path | None, swap: Literal["none", "attention"] | None) -> Config:
    """Return the configuration of a file, its swap outranked by the flag."""
    config = load_config(path) if path else Config()
    return replace(config, activation_swap=swap) if swap else config


def make_passes(names: str | None, config: Config) -> tuple[Pass, ...]:
    """Return the passes that the flag names, else those that the configuration asks for; raises RequestError."""
    asked = passes_for(config)
    return tuple(map(make_pass, asked)) if names is None else parse_passes(names)
