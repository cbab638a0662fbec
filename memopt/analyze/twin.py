"""A fake twin of a model: same modules and shapes, no memory. The live model is never run, its state never moves."""

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from memopt.errors import TraceError

_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


def twin_of_model(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a deep copy of a live model on fake tensors, without the user's hooks, in train mode."""
    try:
        with FakeCopyMode(mode):
            twin = copy.deepcopy(model)
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} cannot be deep-copied, which tracing needs: {error}; "
            "analyze its config instead of the live model"
        ) from error
    for module in twin.modules():
        for hooks in _HOOKS:
            getattr(module, hooks).clear()
    return twin.train()


def twin_of_config(config: Any, mode: FakeTensorMode, *, dtype: torch.dtype, attn_implementation: str) -> nn.Module:
    """Return the model that a transformers config describes, on fake CPU tensors, in train mode."""
    with mode:
        return _model_class(config)._from_config(config, dtype=dtype, attn_implementation=attn_implementation).train()


def _model_class(config: Any) -> Any:
    """Return the class that the config names as its architecture, else the causal language model of its type."""
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
