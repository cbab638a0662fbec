"""Plan for a GPU without one: call the SDPA kernel that CUDA would choose, whose meta kernel runs anywhere.

The rules are those of torch's own choice (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), in its order.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

MAX_FLASH_HEAD_DIM = 256
_HALF = (torch.bfloat16, torch.float16)


def cuda_scaled_dot_product_attention(
    sdpa: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attend as CUDA would: flash, else memory-efficient, else math; shapes (batch, heads, length, head_dim)."""
    backend = chosen_backend(query, key, value, attn_mask, enable_gqa)
    if backend is SDPBackend.FLASH_ATTENTION:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if backend is SDPBackend.EFFICIENT_ATTENTION:
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
            enable_gqa=enable_gqa,
        )  # fmt: skip


def chosen_backend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, enable_gqa: bool
) -> SDPBackend:
    """Return the kernel that CUDA takes for these operands."""
    head_dims = {t.shape[-1] for t in (query, key, value)}
    if query.dim() == 4:
        one_width = len(head_dims) == 1 and max(head_dims) <= MAX_FLASH_HEAD_DIM
        if query.dtype in _HALF and attn_mask is None and one_width:
            return SDPBackend.FLASH_ATTENTION
        if query.dtype in (*_HALF, torch.float32) and not enable_gqa:
            return SDPBackend.EFFICIENT_ATTENTION
    return SDPBackend.MATH


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    if width % 8:
        query, key, value = (pad(t, (0, 8 - width % 8)) for t in (query, key, value))
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention
    out: torch.Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    return out[..., :width] if width % 8 else out


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    bias = None if attn_mask is None else _additive_bias(attn_mask, query, key)
    save_statistics = any(t.requires_grad for t in (query, key, value))
    efficient: Any = torch.ops.aten._scaled_dot_product_efficient_attention
    out: torch.Tensor = efficient(query, key, value, bias, save_statistics, dropout_p, is_causal, scale=scale)[0]
    return out


def _additive_bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return a mask as the kernel wants it: additive, of the query's dtype, expanded over batch and heads."""
    if mask.dtype is torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, torch.full_like(zero, float("-inf")))
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
