"""Recognize expensive operations by the functions that Python calls. Analysis and runtime must agree on this."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memopt.ir.op_policy import Family

_FUNCTIONS: Mapping[Family, tuple[str, ...]] = {
    Family.MM: ("torch.mm", "torch.Tensor.mm"),
    Family.GROUPED_MM: ("torch.nn.functional.grouped_mm", "torch._grouped_mm"),
    Family.SCALED_MM: (
        "torch._scaled_mm", "torch._scaled_grouped_mm", "torch.nn.functional.scaled_mm",
        "torch.nn.functional.scaled_grouped_mm",
    ),
    Family.ADDMM: ("torch.addmm", "torch.Tensor.addmm"),
    Family.BMM: ("torch.bmm", "torch.Tensor.bmm", "torch.baddbmm", "torch.Tensor.baddbmm", "torch.functional.einsum"),
    Family.CONVOLUTION: (
        "torch.conv1d", "torch.conv2d", "torch.conv3d", "torch.conv_transpose1d", "torch.conv_transpose2d",
        "torch.conv_transpose3d",
    ),
    Family.UPSAMPLE: ("torch.nn.functional.interpolate",),
    Family.ATTENTION: ("torch.nn.functional.scaled_dot_product_attention",),
}  # fmt: skip
_OPERATORS: Mapping[str, Family] = {
    "aten::mm": Family.MM,
    "aten::_grouped_mm": Family.GROUPED_MM,
    "aten::_scaled_grouped_mm": Family.SCALED_MM,
    "transformers::grouped_mm_fallback": Family.GROUPED_MM,
    "aten::addmm": Family.ADDMM,
    "aten::bmm": Family.BMM,
    "aten::baddbmm": Family.BMM,
    "aten::_scaled_mm": Family.SCALED_MM,
    "aten::convolution": Family.CONVOLUTION,
    "aten::upsample_bilinear2d": Family.UPSAMPLE,
    "aten::scaled_dot_product_attention": Family.ATTENTION,
    "aten::_scaled_dot_product_flash_attention": Family.ATTENTION,
    "aten::_scaled_dot_product_flash_attention_for_cpu": Family.ATTENTION,
    "aten::_scaled_dot_product_efficient_attention": Family.ATTENTION,
    "aten::_scaled_dot_product_cudnn_attention": Family.ATTENTION,
    "aten::_scaled_dot_product_fused_attention_overrideable": Family.ATTENTION,
    "aten::_flash_attention_forward": Family.ATTENTION,
    "aten::_efficient_attention_forward": Family.ATTENTION,
    "flash_attn::_flash_attn_forward": Family.ATTENTION,
    "flash_attn::_flash_attn_varlen_forward": Family.ATTENTION,
    "torch_attn::_varlen_attn": Family.ATTENTION,
    "npu::npu_fusion_attention": Family.ATTENTION,
    "npu::npu_fusion_attention_v2": Family.ATTENTION,
    "npu::npu_fusion_attention_v3": Family.ATTENTION,
    "deepep::dispatch": Family.COMMUNICATION,
    "deepep::combine": Family.COMMUNICATION,
    "hybridep::dispatch": Family.COMMUNICATION,
    "hybridep::combine": Family.COMMUNICATION,
    "_c10d_functional::all_to_all_single": Family.COMMUNICATION,
    "_c10d_functional::reduce_scatter_tensor": Family.COMMUNICATION,
    "_c10d_functional::all_reduce": Family.COMMUNICATION,
}
"""Operators that Python calls through torch.ops; those that this process has not registered are simply never called."""


def family_of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Family | None:
    """Return the family of a call as a TorchFunctionMode sees it, None for all that is cheap or writes to an argument."""
    find = FINDERS.get(func)
    if find is None:
        find = FINDERS[func] = _operator_finder(func) if isinstance(func, _OPERATOR_TYPES) else cheap
    return find(args, kwargs) if "out" not in kwargs else None


def draws(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call of a family takes random numbers: only attention with dropout does."""
    position = _dropout_position(func)
    if position is None:
        return False
    value = kwargs.get("dropout_p", args[position] if len(args) > position else 0.0)
    return bool(value)


def cheap(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Find no family, whatever the operands."""
    return None


Finder = Callable[[tuple[Any, ...], Mapping[str, Any]], Family | None]
_OPERATOR_TYPES = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def _always(family: Family) -> Finder:
    return lambda args, kwargs: family


def _linear(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Family:
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    return Family.MM if bias is None else Family.ADDMM


def _matmul(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Family:
    operands = (*args, *kwargs.values())
    return Family.BMM if all(t.dim() > 2 for t in operands[:2]) else Family.MM


def _finders() -> dict[Callable[..., Any], Finder]:
    finders: dict[Callable[..., Any], Finder] = {
        torch.nn.functional.linear: _linear,
        torch.matmul: _matmul,
        torch.Tensor.matmul: _matmul,
        torch.Tensor.__matmul__: _matmul,
        torch.Tensor.__rmatmul__: _matmul,
    }
    for family, names in _FUNCTIONS.items():
        for name in names:
            if (func := _resolved(name)) is not None:  # newer or older torch may lack one
                finders[func] = _always(family)
    return finders


def _resolved(name: str) -> Callable[..., Any] | None:
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
    return found


def operator_family(operator: Any) -> Family | None:
    """Return the family of an operator; an overload packet, which equals none of its overloads, is its default one."""
    if isinstance(operator, torch._ops.HigherOrderOperator):
        return Family.ATTENTION if operator.name() == "flex_attention" else None
    overload = operator if isinstance(operator, torch._ops.OpOverload) else getattr(operator, "default", None)
    if overload is None or overload._overloadname != "default":
        return None
    return _OPERATORS.get(overload._schema.name)


def _operator_finder(operator: Any) -> Finder:
    family = operator_family(operator)
    return cheap if family is None else _always(family)


@functools.cache
def _dropout_position(func: Callable[..., Any]) -> int | None:
    if func is torch.nn.functional.scaled_dot_product_attention:
        return 4
    if isinstance(func, torch._ops.OpOverloadPacket):
        func = getattr(func, "default", func)
    names = [argument.name for argument in func._schema.arguments] if isinstance(func, torch._ops.OpOverload) else []
    return names.index("dropout_p") if "dropout_p" in names else None


FINDERS = _finders()
"""How the family of a function's calls is found; operators and cheap functions are added as they are met."""
