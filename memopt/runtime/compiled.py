"""The forward of a checkpointed module that torch.compile may have: torch's own checkpoint, which dynamo understands."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import skip_code
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from memopt.ir import OP_POLICIES, OpPolicy
from memopt.operations import operator_family
from memopt.runtime.forward import run_region
from memopt.runtime.region import Region, region_of
from memopt.runtime.replay.cache import holds_keys, without_cache


def forward_for_compile(owner: Any, base: Any) -> Callable[..., Any]:
    """Return a plain method for a generated class: as compiled, torch's checkpoint; eagerly, a region as any other."""

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _run(self, super(owner, self).forward, args, kwargs)

    return forward


def _run(module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a module's forward, in a graph or eagerly: also where dynamo broke the graph inside of it.

    Only then does dynamo meet this function's own frame, which it is told to skip: it would leave torch's checkpoint to
    run eagerly, with saved results that somebody may have written to.
    """
    if not torch.compiler.is_compiling():
        return _run_eagerly(module, inner, args, kwargs)
    if torch.compiler.is_exporting():  # a program that is exported has no backward to save memory for
        return inner(*args, **kwargs)
    region = region_of(module)
    if region is None or not module.training or not torch.is_grad_enabled() or holds_keys(module, args, kwargs):
        return inner(*args, **kwargs)
    args, kwargs = without_cache(args, kwargs)
    return _checkpointed(inner, region, args, kwargs)


skip_code(_run.__code__)
_run_eagerly = torch.compiler.disable(run_region)


def _checkpointed(inner: Callable[..., Any], region: Region, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    policy = OP_POLICIES[str(region.policy)]

    def call(*args: Any) -> Any:  # by keyword, checkpoint would take what is named like a parameter of its own
        return inner(*args, **kwargs)

    if not policy.always and not policy.alternate:
        return checkpoint(call, *args, use_reentrant=False)
    contexts = functools.partial(_contexts, policy)
    return checkpoint(call, *args, use_reentrant=False, context_fn=contexts)


def _contexts(policy: OpPolicy) -> Any:
    """Return what tags the operators of one region, with a count of its own."""
    return create_selective_checkpoint_contexts(_Tagging(policy))


class _Tagging:
    """Say for each operator of a region whether its result is saved; there is nothing in the graph that writes to it."""

    def __init__(self, policy: OpPolicy) -> None:
        self._policy = policy
        self._num_alternating = 0

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> TorchPolicy:
        """Return torch's name for what the policy says."""
        family = operator_family(operator)
        if family in self._policy.always:
            return TorchPolicy.MUST_SAVE
        if family not in self._policy.alternate:
            return TorchPolicy.PREFER_RECOMPUTE
        self._num_alternating += 1
        return TorchPolicy.MUST_SAVE if self._num_alternating % 2 else TorchPolicy.MUST_RECOMPUTE
