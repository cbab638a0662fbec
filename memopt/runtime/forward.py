"""The forward of a rewritten module: open a group, save through its hooks, close it."""

import functools
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from memopt.errors import GraphCompileError
from memopt.ir import Action
from memopt.runtime.choice import Choice
from memopt.runtime.contract import refuse_compile
from memopt.runtime.engine import engine_of
from memopt.runtime.group import Group
from memopt.runtime.module_state import link, state_of
from memopt.runtime.parts import PartsGroup
from memopt.runtime.prediction import predicts
from memopt.runtime.region import Region, method_region, previous_of, region_of
from memopt.runtime.replan import decide_anew
from memopt.runtime.replay import run_checkpointed
from memopt.runtime.replay.cache import has_cache, holds_keys, tell_once, without_cache
from memopt.runtime.roles import Lesson, signature

_OWNERS = frozenset(
    {
        ("torch.utils.checkpoint", "_checkpoint_hook"),
        ("torch.utils.checkpoint", "_recomputation_hook"),
        ("torch.autograd.graph", "_swap_with_cloned"),
    }
)
"""The (module, class) of the pack hooks to which a region leaves what it saves."""


class _Inside(threading.local):
    """The rewritten modules that this thread is in the forward of."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []


_inside = _Inside()


def run_region(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a module's forward with its saves going through a group; where there is nothing to save, just call it."""
    region = region_of(module)
    if region is None:  # a forward that was read before memopt.undo
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():
        refuse_compile(region.fqn, recomputes=region.action is Action.RECOMPUTE)
    if _is_graph_traced():
        raise GraphCompileError(region.fqn)
    device = _device(module, args, kwargs) if _saves(module) else None
    if device is None:
        return forward(*args, **kwargs)
    if region.action is Action.RECOMPUTE:
        return _run_checkpointed(module, region, device, forward, args, kwargs)
    return _run(module, region, device, forward, args, kwargs)


def _run(
    module: nn.Module,
    region: Region,
    device: torch.device,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    state = state_of(module)
    key = signature(module, args, kwargs, device.type)
    table = state.table_of(key)
    learns = table is None and not (region.collects and region.offload is None)  # where nothing is swapped all stays
    lesson = Lesson() if learns else None
    choice = Choice(region, module, device)
    settings = (region, engine_of(device), state.counters, choice)
    if region.collects:
        group: Group = PartsGroup(*settings, table=table, lesson=lesson, swapped=state.swapped.get(key, region.swapped))
    else:
        group = Group(*settings, table=table, lesson=lesson)
    link(group, module, previous_of(module))
    _inside.modules.append(module)
    try:
        with (
            lesson.watching(module) if lesson else nullcontext(),
            torch.autograd.graph.saved_tensors_hooks(group.pack, group.unpack),
        ):
            output = forward(*args, **kwargs)
    except BaseException:
        group.let_go()
        raise
    finally:
        _inside.modules.pop()
    if lesson:
        state.remember(key, group.learned(lesson.table(output)))
        if isinstance(group, PartsGroup):
            decide_anew(module, key, group.sizes)
    group.close()
    if table is not None and not group.fits_table:
        state.forget(key)  # the forward took another way; the next call learns it
    return output


def run_method(
    module: nn.Module, name: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call a method of a module that is recomputed by itself; where there is nothing to save, just call it."""
    region = region_of(module)
    if region is None or not module.training:
        return method(*args, **kwargs)
    device = _device(module, args, kwargs) if _saves_in_method() else None
    if device is None:
        return method(*args, **kwargs)
    part = method_region(region, name)
    return run_checkpointed(module, part, method, args, kwargs, device=device, counters=state_of(module).counters)


def _run_checkpointed(
    module: nn.Module,
    region: Region,
    device: torch.device,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    if not module.training:
        return forward(*args, **kwargs)
    if has_cache(args, kwargs):
        if holds_keys(module, args, kwargs):
            tell_once(module, is_full=True)
            return forward(*args, **kwargs)
        tell_once(module)
        args, kwargs = without_cache(args, kwargs)
    inside = functools.partial(_inside_of, module, forward)
    return run_checkpointed(module, region, inside, args, kwargs, device=device, counters=state_of(module).counters)


def _inside_of(module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a forward as a part of its module's region; a replay may run in another thread than the forward."""
    _inside.modules.append(module)
    try:
        return forward(*args, **kwargs)
    finally:
        _inside.modules.pop()


def _saves(module: nn.Module) -> bool:
    """Tell whether autograd will save real tensors, and no call of this module around us sees to them already."""
    return not any(inside is module for inside in _inside.modules) and _saves_in_method()


def _saves_in_method() -> bool:
    return (
        torch.is_grad_enabled()
        and torch._C._functorch.peek_interpreter_stack() is None
        and (predicts() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None)
        and forward_ad._current_level < 0
        and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        and not _has_owner()
    )


def _has_owner() -> bool:
    """Tell whether hooks of torch around this call see to what is saved.

    Its checkpoint drops it, and swapping it would be for nothing; `allow_mutation_on_saved_tensors` needs it as it is.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return False
    pack = hooks[0]  # any callable: a partial has neither name
    return (getattr(pack, "__module__", ""), getattr(pack, "__qualname__", "").partition(".")[0]) in _OWNERS


def _is_graph_traced() -> bool:
    """Tell whether torch.jit, torch.fx or make_fx is recording this call."""
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
        or torch.fx._symbolic_trace.is_fx_symbolic_tracing()
    )


def _device(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device | None:
    """Return where a region computes: at its parameters, else at its first tensor argument."""
    first: torch.Tensor | None = _first_parameter(module)
    if first is None:
        first = next((t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)), None)
    return None if first is None or first.device.type == "meta" else first.device


def _first_parameter(module: nn.Module) -> nn.Parameter | None:
    """Return what `module.parameters()` begins with, which takes ten times as long to say so."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for child in module._modules.values():
        if child is not None and (found := _first_parameter(child)) is not None:
            return found
    return None
