"""What a saved tensor is to torch: its storage, and whether it is a parameter. Analysis and runtime must agree on this."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from memopt.ir.graph import Kind

MAX_CAST_CHAIN = 4
"""How many view and cast nodes may lie between a parameter and its cast: ``weight.to(bf16).t()`` has two."""

VIEWS = frozenset(
    {
        "AliasBackward0", "AsStridedBackward0", "DetachBackward0", "ExpandBackward0", "PermuteBackward0",
        "ReshapeAliasBackward0", "SelectBackward0", "SliceBackward0", "SplitBackward0", "SplitWithSizesBackward0",
        "SqueezeBackward0", "SqueezeBackward1", "TBackward0", "TransposeBackward0", "UnbindBackward0",
        "UnsafeViewBackward0", "UnsqueezeBackward0", "ViewBackward0",
    }
)  # fmt: skip
"""The autograd nodes of views."""
_VIEWS_AND_CASTS = VIEWS | {"CloneBackward0", "ToCopyBackward0"}


NOTHING = torch.empty(0)
"""The data of a tensor that is there for its version only."""


def storage_key(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage; it is unique only while the storage or a weak reference lives."""
    return tensor.untyped_storage()._cdata


def storage_keys(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """Return the storages of several tensors; those without one (sparse) are left out."""
    return frozenset(storage_key(t) for t in tensors if t.layout is torch.strided)


def is_parameter(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is an `nn.Parameter`, whose own answer takes five times as long for a plain tensor."""
    return type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter)


def kind_of(tensor: torch.Tensor, parameters: frozenset[int], buffers: frozenset[int]) -> Kind:
    """Tell what a saved tensor is, given the storages of the parameters and buffers around it.

    Linear and expert weights reach autograd as views (``weight.t()``), autocast saves casts of them: neither is an
    instance of `nn.Parameter`.
    """
    if is_parameter(tensor) or (tensor._base is not None and is_parameter(tensor._base)):
        return Kind.PARAMETER
    key = storage_key(tensor)
    if key in parameters:
        return Kind.PARAMETER
    if key in buffers:
        return Kind.BUFFER
    return Kind.PARAMETER_CAST if _casts_a_parameter(tensor) else Kind.ACTIVATION


Source = tuple[Any, ...]
"""A tensor as the graph knows it: the node that made it, which of that one's outputs it is; its geometry and device."""


def source_of_casts(tensor: torch.Tensor) -> Source:
    """Return what `cast_source` says of the casts of a tensor that have its geometry."""
    return tensor.grad_fn, tensor.output_nr, tensor.shape, tensor.stride(), tensor.device


def cast_source(tensor: torch.Tensor) -> Source | None:
    """Return what a tensor, or what it is a view of, was cast from, if that had the same geometry; None for any other."""
    node: Any = tensor.grad_fn
    while node is not None and node.name() in VIEWS and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    if node is None or node.name() != "ToCopyBackward0" or is_odd(tensor):
        return None
    whole = tensor if tensor._base is None else tensor._base
    return *node.next_functions[0], whole.shape, whole.stride(), whole.device


def is_odd(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is more, or less, than the values in its storage."""
    return tensor.is_nested or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()


def _casts_a_parameter(tensor: torch.Tensor) -> bool:
    node = tensor.grad_fn
    for _ in range(MAX_CAST_CHAIN + 1):
        if node is None:
            return False
        if (name := node.name()) == "torch::autograd::AccumulateGrad":
            return isinstance(node.variable, nn.Parameter)  # type: ignore[attr-defined]
        if name not in _VIEWS_AND_CASTS or len(following := node.next_functions) != 1:
            return False
        node = following[0][0]
    return False
