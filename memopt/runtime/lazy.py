"""Rewrite a model when its first training forward begins: only then are its inputs known."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memopt.ir import Plan
from memopt.runtime.apply import Rewriting, undo
from memopt.runtime.contract import refuse_compile
from memopt.runtime.counters import Stats, summed
from memopt.runtime.pool import PoolStats

Rewrite = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Rewriting]


class RewriteOnFirstForward:
    """A forward pre-hook that rewrites its module once, before the first forward that trains, and takes itself off."""

    def __init__(self, rewrite: Rewrite) -> None:
        self._rewrite = rewrite
        self.rewriting: Rewriting | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace, plan and apply with the arguments of this very forward."""
        if torch.compiler.is_compiling():
            refuse_compile(type(module).__name__, is_waiting=True)
        if module.training and torch.is_grad_enabled():
            self.rewriting = self._rewrite(module, args, kwargs)
            take_off(module)


@dataclass(frozen=True, repr=False)
class PendingRewriting:
    """A rewriting that happens on the model's first training forward."""

    model: nn.Module
    hook: RewriteOnFirstForward

    @property
    def plan(self) -> Plan | None:
        """The plan, None until the first training forward made it."""
        return self.hook.rewriting.plan if self.hook.rewriting else None

    def __repr__(self) -> str:
        state = repr(self.hook.rewriting) if self.hook.rewriting else "waiting for the first training forward"
        return f"<{type(self).__name__} of {type(self.model).__name__}: {state}>"

    def stats(self) -> Stats:
        """Return what was registered, copied and replayed since the plan came into effect, but for compiled calls."""
        return self.hook.rewriting.stats() if self.hook.rewriting else summed(())

    def pool_stats(self) -> dict[torch.device, PoolStats]:
        """Return, for each device of the model, what was asked of its host memory; nothing before the first forward."""
        return self.hook.rewriting.pool_stats() if self.hook.rewriting else {}

    def reset_pool_stats(self) -> None:
        """Count hits, misses and the peak from now on."""
        if self.hook.rewriting:
            self.hook.rewriting.reset_pool_stats()

    def undo(self) -> None:
        """Give every rewritten module its own class back, or stop waiting."""
        take_off(self.model)
        undo(self.model)


def rewrite_on_first_forward(model: nn.Module, rewrite: Rewrite) -> PendingRewriting:
    """Put the hook on a model; one that waits there already is replaced."""
    take_off(model)
    hook = RewriteOnFirstForward(rewrite)
    model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    return PendingRewriting(model, hook)


def take_off(model: nn.Module) -> None:
    """Remove a waiting hook from a model or from a copy of one."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, RewriteOnFirstForward):
            del model._forward_pre_hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)
