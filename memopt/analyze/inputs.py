"""The batch that a model is traced with."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._pytree import tree_map

from memopt.analyze.values import InputValues
from memopt.errors import RequestError, TraceError


def example_inputs(model: nn.Module, *, batch_size: int, seq_length: int) -> dict[str, Any]:
    """Return a batch of token ids (batch_size, seq_length) with labels, as a causal language model is trained.

    To be called under the trace's fake mode: the batch takes no memory.

    Raises RequestError for a model whose forward takes no `input_ids`.
    """
    parameters = inspect.signature(model.forward).parameters
    if "input_ids" not in parameters:
        raise RequestError(
            f"{type(model).__name__}.forward takes no input_ids; pass example inputs: analyze(model, inputs)"
        )
    ids = torch.zeros(batch_size, seq_length, dtype=torch.long)
    inputs: dict[str, Any] = {"input_ids": ids}
    if "labels" in parameters:
        inputs["labels"] = ids.clone()
    if "use_cache" in parameters:
        inputs["use_cache"] = False  # as transformers' Trainer does; a cache would hold every key and value
    return inputs


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs as arguments of forward.

    A mapping goes by keyword, a tensor, tuple or list by position, a pair of a tuple and a dict as both.
    """
    if isinstance(inputs, tuple) and len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], dict):
        return inputs
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def fake_arguments(arguments: Any, values: InputValues, mode: FakeTensorMode) -> Any:
    """Return arguments of forward with fake tensors for tensors, and copies of all else that forward could change.

    Raises TraceError for an argument that cannot be copied.
    """

    def faked(leaf: Any) -> Any:
        try:
            if isinstance(leaf, torch.Tensor):
                return values.faked(leaf)
            with FakeCopyMode(mode):
                return copy.deepcopy(leaf)
        except Exception as error:
            what = f"of type {type(leaf).__name__}"
            if isinstance(leaf, torch.Tensor):
                what = f"({type(leaf).__name__}, {leaf.dtype}, {leaf.layout}, on {leaf.device})"
            raise TraceError(
                f"an argument {what} cannot be copied, which tracing needs: {error}; "
                "analyze the model with inputs that leave it out"
            ) from error

    return tree_map(faked, arguments)


def batch_shape(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Return (batch_size, seq_length) as the first tensor among the inputs tells them."""
    for value in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return value.shape[0], value.shape[1] if value.dim() > 1 else 1
    return 1, 1
