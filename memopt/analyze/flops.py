"""Count the floating-point operations of an operator, by torch's formulas and a few that it lacks."""

import functools
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

Formula = Callable[..., int]


def flops_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return how many operations a call takes, 0 for operators without a formula: they cost next to nothing."""
    formula = _formula(operator)
    if formula is None:
        return 0
    if operator._overloadname.startswith("dtype"):
        args = args[:-1]  # the dtype of the output, which torch's formulas take for its shape
    return formula(*args, **kwargs, out_val=out)


@functools.cache
def _formula(operator: Any) -> Formula | None:
    if not isinstance(operator, torch._ops.OpOverload):
        return None
    return _OWN.get(operator._schema.name) or flop_registry.get(operator.overloadpacket)


def _grouped_mm(rows: torch.Tensor, weight: torch.Tensor, *args: Any, out_val: Any, **kwargs: Any) -> int:
    """Count rows x in x out: each row meets the matrix of one group."""
    groups = rows.shape[0] if rows.dim() > weight.dim() else 1  # there it is the columns that are grouped
    return 2 * rows.numel() * weight.shape[-1] // groups


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, out_val: Any, **kwargs: Any
) -> int:
    """Count both products for every query head, as torch does: a causal mask is not taken off."""
    return 2 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> int:
    """Count the five products of backward for the two of forward: the scores once more, and four gradients."""
    return prod(query.shape[:-1]) * key.shape[-2] * (6 * query.shape[-1] + 4 * value.shape[-1])


_OWN: Mapping[str, Formula] = {
    "aten::_grouped_mm": _grouped_mm,
    "transformers::grouped_mm_fallback": _grouped_mm,
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_cudnn_attention": _attention,
    "aten::_scaled_dot_product_flash_attention_backward": _attention_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention_backward,
}
"""What torch lacks, and attention with fewer key heads than query heads, which older releases refuse."""
