"""The library in four verbs: analyze, plan, apply, undo."""

import functools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memopt.analyze import analyze
from memopt.config import (
    CheckpointMode,
    Config,
    SwapMode,
    parse_config,
    passes_for,
    validate,
)
from memopt.errors import (
    IllegalValueError,
    NoLayerContainerError,
    NoSelfAttentionError,
    NothingOfThatKindError,
    NothingToCheckpointError,
    RequestError,
    UnmatchedPatternError,
)
from memopt.ir import ModuleGraph, Plan, account
from memopt.passes import Pass, Pipeline, make_pass
from memopt.runtime import (
    PendingRewriting,
    Rewriting,
    apply_plan,
    check_is_module,
    check_rewritable,
    rewrite_on_first_forward,
    take_off,
)
from memopt.runtime import undo as undo_rewriting

__all__ = ["analyze", "apply", "plan", "undo"]

AnyConfig = Config | Mapping[str, Any]
_UNFIT = (NoLayerContainerError, NothingToCheckpointError, NothingOfThatKindError, UnmatchedPatternError)
"""What is wrong with a configuration for this model, and shows only when it was traced."""
_LOGGER = logging.getLogger("memopt")
_LEGAL = "a mapping like {'activation_swap': 'attention'} or a memopt.Config"


def plan(
    graph: ModuleGraph,
    config: AnyConfig | None = None,
    *,
    passes: Iterable[Pass | str] | None = None,
    **options: Any,
) -> Plan:
    """Decide what the saved tensors of a traced model do, by a configuration or its keys as keyword arguments.

    `passes`, or their names with options, go without a configuration, which stands for passes too. Raises MemoptError.
    """
    config = _config(config, options)
    validate(config)
    if not isinstance(graph, ModuleGraph):
        raise IllegalValueError("graph", type(graph).__name__, "a ModuleGraph, as memopt.analyze returns it")
    if passes is not None and config != Config():
        raise RequestError(
            f"give passes or a configuration, not both: {_given(config)} would be lost beside the passes; "
            "what a pass is to do, its own options say"
        )
    passes = passes_for(config) if passes is None else passes
    passes = [passes] if isinstance(passes, Pass | str) else passes
    return Pipeline([make_pass(p) if isinstance(p, str) else p for p in passes]).run(Plan(graph=graph))


def apply(
    model: nn.Module, plan_or_config: Plan | AnyConfig, inputs: Any = None, *, autocast: str = "none"
) -> Rewriting | PendingRewriting:
    """Rewrite a live model by a plan or by a configuration; undo with the result.

    With a configuration the model is traced with `inputs` (under `autocast`), or without them on its first training
    forward, with that forward's inputs and autocast. Names, keys, parameters and gradients stay. Raises MemoptError;
    the model is then as it was.
    """
    check_is_module(model)
    model = model.module if isinstance(model, DistributedDataParallel) else model
    if isinstance(plan_or_config, Plan):
        return apply_plan(model, plan_or_config)
    config = _config(
        plan_or_config, {}, legal="a mapping like {'activation_swap': 'attention'}, a memopt.Config or a Plan"
    )
    validate(config)
    if inputs is not None:
        return _trace_and_apply(config, model, inputs, autocast=autocast)
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if config.activation_swap == "attention" and "self_attn" not in names:
        raise NoSelfAttentionError(type(model).__name__)
    _check(config, model)
    return rewrite_on_first_forward(model, functools.partial(_apply_in_forward, config))


def undo(model: nn.Module) -> None:
    """Take every rewriting out of a model, or out of a copy of one, and one that still waits for its first forward."""
    check_is_module(model)
    model = model.module if isinstance(model, DistributedDataParallel) else model
    take_off(model)
    undo_rewriting(model)


def _apply_in_forward(config: Config, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rewriting:
    device = next((p.device.type for p in model.parameters()), "cpu")
    autocast = "none"
    if torch.is_autocast_enabled(device):
        autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    try:
        return _trace_and_apply(config, model, (args, kwargs), autocast=autocast)
    except _UNFIT as error:
        error.args = (f"{error}: the model waits for another forward until handle.undo() or memopt.undo(model)",)
        raise


def _trace_and_apply(config: Config, model: nn.Module, inputs: Any, *, autocast: str) -> Rewriting:
    _check(config, model)  # transformers' checkpointing, turned on since, leaves a trace nothing to find
    planned = plan(analyze(model, inputs, autocast=autocast), config)
    if planned.offload and not account(planned).swap_bytes:
        _LOGGER.warning(
            "memopt offloads nothing of %s: no tensor of the regions has min_tensor_elements=%d elements, or margin, "
            "fraction or pp_rank_delta_bytes keep them; memopt-analyze says which",
            type(model).__name__,
            planned.offload.min_tensor_elements,
        )
    return apply_plan(model, planned)


def _check(config: Config, model: nn.Module) -> None:
    parts = bool(config.activation_offload or config.recompute)
    swaps = config.activation_checkpoint == "off"
    check_rewritable(model, swaps=swaps, compiles=config.enable_compile, parts=parts)


def _config(config: AnyConfig | None, options: Mapping[str, Any], *, legal: str = _LEGAL) -> Config:
    if isinstance(config, Config) and not options:
        return config
    if isinstance(config, Config):
        raise RequestError("give a Config or its keys, not both")
    if not isinstance(config, Mapping | None):
        value = config if isinstance(config, str | Path) else type(config)
        raise IllegalValueError("config", value, legal + _hint(config))
    return parse_config({**(config or {}), **options})


def _hint(value: object) -> str:
    """Return how to make a configuration or a plan of a value that is neither, with the semicolon before it."""
    if isinstance(value, ModuleGraph):
        return "; of a graph memopt.plan(graph) makes a plan"
    if not isinstance(value, str | Path):
        return ""
    if value in get_args(CheckpointMode):
        return f"; write {{'activation_checkpoint': {value!r}}}"
    if value in get_args(SwapMode):
        return f"; write {{'activation_swap': {value!r}}}"
    return "; read a YAML file with memopt.config.load_config(path), a saved plan with memopt.load_plan(path)"


def _given(config: Config) -> str:
    """Return what a configuration says that is not the default."""
    differing = (key for key, value in asdict(config).items() if value != getattr(Config(), key))
    return " and ".join(f"{key}={getattr(config, key)!r}" for key in differing)
