"""What a rewriting must not meet, and must not change."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from memopt.errors import (
    CHECKPOINT_TWICE,
    PARTS_AND_CHECKPOINT,
    SWAP_AND_CHECKPOINT,
    GraphCompileError,
    IllegalValueError,
    IncompatibleError,
    RewriteError,
)


def check_is_module(model: object) -> None:
    """Raise IllegalValueError for anything but a module."""
    if not isinstance(model, nn.Module):
        raise IllegalValueError("model", type(model).__name__, "a torch.nn.Module")


def check_rewritable(model: nn.Module, *, swaps: bool = True, compiles: bool = False, parts: bool = False) -> None:
    """Raise an error for a model that is compiled, or that has gradient checkpointing on.

    GraphCompileError for what runs eagerly only, RewriteError for what may be compiled, but afterwards; and
    IncompatibleError, which says whether all of a module or `parts` of layers are decided on.
    """
    if isinstance(model, OptimizedModule | torch.jit.ScriptModule):
        _refuse_compiled(type(model).__name__, swaps=swaps, compiles=compiles)
    for fqn, module in model.named_modules():
        if getattr(module, "_compiled_call_impl", None) is not None:
            _refuse_compiled(fqn or type(model).__name__, swaps=swaps, compiles=compiles)
        if getattr(module, "gradient_checkpointing", False):
            whole = SWAP_AND_CHECKPOINT if swaps else CHECKPOINT_TWICE
            raise IncompatibleError(PARTS_AND_CHECKPOINT if parts else whole)


def _refuse_compiled(name: str, *, swaps: bool, compiles: bool) -> None:
    if compiles:
        raise RewriteError(f"{name!r} is compiled already; apply the plan first, and compile after that")
    raise GraphCompileError(name, state="compiled", recomputes=not swaps)


def check_target(module: nn.Module) -> None:
    """Raise RewriteError for a module whose class torch itself is about to change, or has changed, under us."""
    name = type(module).__name__
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise RewriteError(f"{name} has parameters without a shape; run it once on a batch before it is rewritten")
    if is_parametrized(module):
        raise RewriteError(f"{name} is parametrized itself; rewrite it first and parametrize it after that")
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise RewriteError(f"{name} has no forward; rewrite the modules that it holds")


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Raise RewriteError, with the difference, if the body changes keys, names or parameters of a model."""
    before = _names(model)
    yield
    after = _names(model)
    for kind, old in before.items():
        if changed := old.items() ^ after[kind].items():
            names = sorted({name for name, _ in changed})
            raise RewriteError(f"rewriting changed the model's {kind}: {', '.join(names[:5])}")


def _names(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return, per kind, names with the identity of what they name; a state_dict holds fresh tensors, so only its keys."""
    return {
        "state_dict keys": dict.fromkeys(model.state_dict(), 0),
        "modules": {name: id(m) for name, m in model.named_modules(remove_duplicate=False)},
        "parameters": {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)},
        "buffers": {name: id(b) for name, b in model.named_buffers(remove_duplicate=False)},
    }


@torch.compiler.assume_constant_result
def refuse_compile(fqn: str, *, is_waiting: bool = False, recomputes: bool = False) -> None:
    """Raise where a graph compiler sees it: a plain raise would be swallowed by a graph break."""
    raise GraphCompileError(fqn, state="waiting" if is_waiting else "rewritten", recomputes=recomputes)
