"""Policies on live tensors: the arithmetic of `memopt.ir.policy`, asked about a torch.Tensor."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy

from memopt.ir import CheckpointPolicy, attention_keep_reason

SWAPS = (CheckpointPolicy.MUST_SWAP, CheckpointPolicy.MUST_CPU_OFFLOAD, TorchPolicy.MUST_CPU_OFFLOAD)
"""The answers of a policy that mean: swap."""


def attention_swap_policy(tensor: torch.Tensor) -> CheckpointPolicy:
    """Return MUST_SWAP for what attention swap moves, else MUST_SAVE (RFC section 6.2)."""
    reason = attention_keep_reason(
        requires_grad=tensor.requires_grad,
        num_dims=tensor.dim(),
        tensor_bytes=tensor.numel() * tensor.element_size(),
        storage_bytes=tensor.untyped_storage().nbytes(),
    )
    return CheckpointPolicy.MUST_SWAP if reason is None else CheckpointPolicy.MUST_SAVE


def attention_keeps_looks(tensor: torch.Tensor) -> bool:
    """Tell whether attention swap keeps a tensor whatever its storage is: for its size, its dims, as it needs no grad."""
    num_bytes = tensor.numel() * tensor.element_size()
    reason = attention_keep_reason(
        requires_grad=tensor.requires_grad, num_dims=tensor.dim(), tensor_bytes=num_bytes, storage_bytes=num_bytes
    )
    return reason is not None


KEPT_LOOKS: MappingProxyType[str, Callable[[torch.Tensor], bool]] = MappingProxyType(
    {"attention": attention_keeps_looks}
)
"""By the name of a policy, what tells the tensors that it keeps by their looks alone."""
TENSOR_POLICIES: MappingProxyType[str, Callable[[torch.Tensor], Any]] = MappingProxyType(
    {"attention": attention_swap_policy}
)
"""By the name that a decision gives, a key of `memopt.ir.policy.POLICIES`."""


def policy_of(policy: str | Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """Return the function that a policy's name stands for; a function stands for itself."""
    return TENSOR_POLICIES[policy] if isinstance(policy, str) else policy
