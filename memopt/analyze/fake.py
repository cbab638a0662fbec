"""Make a forward on fake tensors look like a real one: no weights, no GPU, the same saves."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from memopt.analyze.cuda_sdpa import cuda_scaled_dot_product_attention
from memopt.analyze.flops import flops_of
from memopt.analyze.values import carry_value, value_of

DEVICE = torch.ops.prim.device.default
"""What C++ asks a fake tensor for at every turn: more often than it runs an operator."""
_MEAN_IN_PLACE = frozenset(
    {torch.ops.aten.mse_loss.default, torch.ops.aten.smooth_l1_loss.default, torch.ops.aten.soft_margin_loss.default}
)
"""Losses whose kernels write a mean or a sum where they have written its terms, so that their storage is as large."""


class TraceMode(FakeTensorMode):
    """FakeTensorMode with the kernels that it lacks, and a count of what the operators take."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self._is_inside = False

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer an operator and count it; what it is made of is not counted, and its answer may come from a cache."""
        if func is DEVICE and not self.in_kernel_invocation:
            return args[0].fake_device
        if self._is_inside:
            return self._answer(func, types, args, kwargs)
        self._is_inside = True
        try:
            out = self._answer(func, types, args, kwargs)
        finally:
            self._is_inside = False
        self.flops += flops_of(func, args, kwargs or {}, out)
        return out

    def _answer(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Answer as real kernels do where the meta kernels do not."""
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], [number for index in args[1] for number in self._as_numbers(index)])
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            return _grouped_mm_output(*args[:3])
        out = self._ask(func, types, args, kwargs)
        if func is torch.ops.aten.detach.default:  # hooks call it, below all that follows functions
            carry_value(args[0], out)
        if func is torch.ops.aten.native_layer_norm.default:
            return _with_wide_statistics(*out, weight=args[2])
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            return (_laid_out_as(args[0], out[0]), *out[1:])
        if func is torch.ops.aten.view.default and 1 in out.shape:
            return out.as_strided(out.shape, _strides_of_view(*args), out.storage_offset())
        if func in _MEAN_IN_PLACE and out.numel() == 1:
            out.untyped_storage().resize_(torch.broadcast_shapes(*(t.shape for t in args[:2])).numel() * out.itemsize)
        return out

    def _ask(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Answer by the meta kernels."""
        return super().dispatch(func, types, args, kwargs)

    def _as_numbers(self, index: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the positions that a mask picks, if its values are known; any other index as it is."""
        if index is None or index.dtype is not torch.bool or (mask := value_of(index)) is None:
            return (index,)
        with unset_fake_temporarily():
            picked = mask.nonzero(as_tuple=True)
        return tuple(self.from_tensor(positions).to(index.device) for positions in picked)


def _grouped_mm_output(one: torch.Tensor, other: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
    """Return an empty result: (tokens, in) x (experts, in, out) -> (tokens, out).

    In backward (in, tokens) x (tokens, out) -> (experts, in, out), where each expert's tokens end at one of `ends`.
    """
    shape = (*one.shape[:-1], other.shape[-1])
    if one.dim() == other.dim() == 2 and ends is not None:
        shape = (ends.shape[0], *shape)
    return one.new_empty(shape)


def _strides_of_view(tensor: torch.Tensor, shape: Any) -> tuple[int, ...]:
    """Return the strides that a view has in a real run, those of one element too."""
    with unset_fake_temporarily():
        return torch.empty_strided(tensor.shape, tensor.stride(), device="meta").view(shape).stride()


def _laid_out_as(query: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return an attention's result with the strides of a dense query, also those of one element: convolutions ask them."""
    if query.shape != out.shape or not torch.ops.aten.is_non_overlapping_and_dense(query):
        return out
    return query.new_empty_strided(query.shape, query.stride(), dtype=out.dtype)


def _with_wide_statistics(
    out: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, *, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what a norm gives with statistics of its weight's dtype, which under autocast is not the input's."""
    if weight is None or weight.dtype is mean.dtype:
        return out, mean, rstd
    return out, mean.to(weight.dtype), rstd.to(weight.dtype)


class TargetKernels(TorchFunctionMode):
    """Call the SDPA kernel of the target device."""

    def __init__(self, target_device: str) -> None:
        super().__init__()
        self._redirects = target_device == "cuda"

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Redirect scaled_dot_product_attention; let everything else through."""
        if func is torch.nn.functional.scaled_dot_product_attention and self._redirects:
            return cuda_scaled_dot_product_attention(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def silent_torch() -> Iterator[None]:
    """Keep torch from printing a traceback wherever a fake operator fails: the error itself has it, or it was caught."""
    logger = logging.getLogger(fake_tensor.__name__)
    was = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was


@contextmanager
def like_a_real_run() -> Iterator[None]:
    """Stop transformers from recognizing fake tensors, which it would trace with other masks and no GQA."""
    from transformers.utils import import_utils

    is_fake = import_utils.is_fake_tensor
    import_utils.is_fake_tensor = lambda tensor: False
    try:
        yield
    finally:
        import_utils.is_fake_tensor = is_fake
