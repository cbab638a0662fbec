"""A fake twin of a model: same modules and shapes, no memory. The live model is never run, its state never moves."""

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from memopt.errors import GraphCompileError, TraceError

_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_OWN = frozenset({"_parameters", "_buffers", "_modules", "_backward_pre_hooks"})
"""Attributes in which a module keeps what is copied one by one."""
_COMPOSABLE = "__composable_api_state_key"
"""What the attributes begin with in which torch's composable APIs keep their state."""
_RECORDS = "_output_capturing_hooks_installed"
"""With it transformers remembers that a model has the hooks which record router logits and the like."""


def twin_of_model(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a deep copy of a live model on fake tensors, whole and without hooks, in train mode.

    Hooks with which transformers records outputs it puts on the copy itself, where that needs them.
    What FSDP2 has sharded is put together: in forward the parameters are whole, in the dtype of the mixed precision.
    Raises GraphCompileError for a model that torch.compile returned, TraceError for one that cannot be copied.
    """
    if isinstance(model, OptimizedModule):
        raise GraphCompileError(type(model._orig_mod).__name__, state="compiled")
    try:
        with FakeCopyMode(mode):
            twin: nn.Module = copy.deepcopy(model, _stand_ins(model, mode)).train()
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} cannot be deep-copied, which tracing needs: {_what_refuses(model, mode, error)}; "
            "take that off or give it a __deepcopy__, or analyze the model's config"
        ) from error
    for module in twin.modules():
        module.__dict__.pop(_RECORDS, None)
    return twin


def has_hooks(model: nn.Module) -> bool:
    """Tell whether a forward of a live model calls hooks, our own aside; its twin has none."""
    hooks = (hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values()))
    return any(not str(getattr(hook, "__module__", "")).startswith("memopt.") for hook in hooks)


def _what_refuses(model: nn.Module, mode: FakeTensorMode, error: Exception) -> str:
    """Return which attribute of which module cannot be copied, and why."""
    for fqn, module in model.named_modules():
        for key, value in vars(module).items():
            if key in _OWN:
                continue
            try:
                with FakeCopyMode(mode):
                    copy.deepcopy(value, _stand_ins(model, mode))
            except Exception as found:
                return f"{f'{fqn}.{key}'.lstrip('.')!r}, a {type(value).__name__}, refuses ({found})"
    return str(error)


def _stand_ins(model: nn.Module, mode: FakeTensorMode) -> dict[int, Any]:
    """Return deepcopy's memo with what is not to be copied as it is: hooks, shards, and FSDP2's own state."""
    memo: dict[int, Any] = {}
    modules = tuple(model.modules())
    for module in modules:
        memo |= {id(getattr(module, hooks)): OrderedDict() for hooks in _HOOKS}
        if (compiled := getattr(module, "_compiled_call_impl", None)) is not None:
            memo[id(compiled)] = None  # the twin runs eagerly
        memo |= {id(value): {} for key, value in module.__dict__.items() if key.startswith(_COMPOSABLE)}
        for parameter in module.parameters(recurse=False):
            if isinstance(parameter, DTensor):
                memo[id(parameter)] = _whole(parameter, module, modules, mode)
    for module in reversed(modules):  # children first
        if isinstance(module, FSDPModule):
            memo[id(module)] = _unsharded(module, memo)
    return memo


def _whole(
    parameter: nn.Parameter, owner: nn.Module, modules: tuple[nn.Module, ...], mode: FakeTensorMode
) -> nn.Parameter:
    around = [m for m in modules if isinstance(m, FSDPModule) and any(inside is owner for inside in m.modules())]
    dtype = around[-1]._get_fsdp_state()._mp_policy.param_dtype if around else None
    with mode:
        whole = torch.empty(parameter.shape, dtype=dtype or parameter.dtype, device=parameter.device)
        return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _unsharded(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a copy with the class that FSDP2 put its own in front of; a sharded module refuses to be copied."""
    own: Any = type(module).__mro__[2]
    made: nn.Module = own.__new__(own)
    made.__dict__.update(copy.deepcopy(module.__dict__, memo))
    return made


def twin_of_config(config: Any, mode: FakeTensorMode, *, dtype: torch.dtype, attn_implementation: str) -> nn.Module:
    """Return the model that a transformers config describes, on fake CPU tensors, in train mode."""
    with mode:
        return (
            class_of_config(config)._from_config(config, dtype=dtype, attn_implementation=attn_implementation).train()
        )


def class_of_config(config: Any) -> Any:
    """Return the class that a config names as its architecture, else the causal language model of its type.

    Raises TraceError if there is neither.
    """
    import transformers

    for name in getattr(config, "architectures", None) or ():
        if (found := getattr(transformers, name, None)) is not None:
            return found
    try:
        return transformers.AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise TraceError(
            f"{type(config).__name__} names no architecture and is no causal language model; "
            "build the model and analyze it live"
        ) from None
