"""The names of the RFC: wrap any one module, chain any two."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memopt.errors import IllegalValueError, RewriteError
from memopt.ir import Action
from memopt.runtime.contract import check_is_module, check_rewritable, preserved
from memopt.runtime.policy import attention_swap_policy
from memopt.runtime.region import Region, region_of, set_previous
from memopt.runtime.rewrite import rewrite_module


def swap_wrapper(
    module: nn.Module, policy_fn: Callable[[torch.Tensor], Any] = attention_swap_policy, group_swap: bool = True
) -> nn.Module:
    """Swap what a module saves for backward, as `policy_fn` says of each tensor; returns the module, rewritten in place.

    `policy_fn` returns a `CheckpointPolicy`, memopt's or torch's; parameters, buffers and casts of parameters stay
    whatever it says. Needs no inputs. The same wrapping again changes nothing; another one is a RewriteError.
    Source: RFC section 6.3.
    """
    check_is_module(module)
    if not callable(policy_fn):
        raise IllegalValueError("policy_fn", policy_fn, "a function of a tensor that returns a memopt.CheckpointPolicy")
    if not isinstance(group_swap, bool):
        raise IllegalValueError("group_swap", group_swap, "True, False")
    region = Region(type(module).__name__, Action.SWAP, policy_fn, group_swap)
    if (present := region_of(module)) == region:
        return module
    if present is not None:
        raise RewriteError(f"{region.fqn} is rewritten already ({present}); call memopt.undo(model) before this")
    check_rewritable(module)
    with preserved(module):
        rewrite_module(module, region)
    return module


class SwapManager:
    """State in which order wrapped modules run, so that backward of each prefetches the one before it."""

    def set_forward_prefetch_layer(self, current: nn.Module, following: nn.Module) -> None:
        """Chain two wrapped modules that run one after the other in forward; raises RewriteError for any other.

        Source: RFC section 6.4.
        """
        if current is following:
            raise RewriteError(f"{type(current).__name__} cannot follow itself in the prefetch chain")
        for module in (current, following):
            check_is_module(module)
            if region_of(module) is None:
                raise RewriteError(f"{type(module).__name__} is not wrapped; call swap_wrapper(module) first")
        set_previous(following, current)
