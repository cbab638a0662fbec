"""The library in four verbs: analyze, plan, apply, undo."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from memopt.analyze import analyze
from memopt.config import Config, parse_config, passes_for, validate_attention_swap
from memopt.errors import RequestError
from memopt.ir import ModuleGraph, Plan
from memopt.passes import Pass, Pipeline, make_pass
from memopt.runtime import Rewriting, apply_plan, undo

__all__ = ["analyze", "apply", "plan", "undo"]

AnyConfig = Config | Mapping[str, Any]


def plan(
    graph: ModuleGraph,
    config: AnyConfig | None = None,
    *,
    passes: Iterable[Pass] | None = None,
    **options: Any,
) -> Plan:
    """Decide what the saved tensors of a traced model do, by a configuration or its keys as keyword arguments.

    `passes` replaces the pipeline that the configuration stands for. Raises MemoptError.
    """
    config = _config(config, options)
    if config.activation_swap == "attention":
        validate_attention_swap(config)
    if passes is None:
        passes = [make_pass(name) for name in passes_for(config)]
    return Pipeline(passes).run(Plan(graph=graph))


def apply(
    model: nn.Module, plan_or_config: Plan | AnyConfig, inputs: Any = None, *, autocast: str = "none"
) -> Rewriting:
    """Rewrite a live model by a plan, or by a configuration and inputs to trace it with; undo with the result.

    Names, keys, parameters and gradients stay. Raises MemoptError; the model is then as it was.
    """
    if isinstance(plan_or_config, Plan):
        return apply_plan(model, plan_or_config)
    if inputs is None:
        raise RequestError("apply(model, config) needs inputs to trace the model with: apply(model, config, inputs)")
    graph = analyze(model, inputs, autocast=autocast)
    return apply_plan(model, plan(graph, plan_or_config))


def _config(config: AnyConfig | None, options: Mapping[str, Any]) -> Config:
    if isinstance(config, Config) and not options:
        return config
    if isinstance(config, Config):
        raise RequestError("give a Config or its keys, not both")
    return parse_config({**(config or {}), **options}) if config else Config(**options)
