"""Make a forward on fake tensors look like a real one: no weights, no GPU, the same saves."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from memopt.analyze.cuda_sdpa import cuda_scaled_dot_product_attention


class TraceMode(FakeTensorMode):
    """FakeTensorMode with the kernels that it lacks."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer for grouped_mm outside bf16: it runs, but its meta kernel refuses."""
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            return _grouped_mm_output(*args[:2])
        return super().dispatch(func, types, args, kwargs)


def _grouped_mm_output(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return an empty result: (tokens, in) x (experts, in, out) -> (tokens, out); for two 2-d operands it has groups."""
    shape = (*rows.shape[:-1], weight.shape[-1])
    return rows.new_empty(shape)


class RealBranches(TorchFunctionMode):
    """Take the branches that a real run takes: SDPA's kernel on the target device, and questions put to mask data."""

    def __init__(self, *, target_device: str, all_attended: bool) -> None:
        super().__init__()
        self._redirect_sdpa = target_device == "cuda"
        self._all_attended = all_attended

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer or redirect the two calls concerned; let everything else through."""
        kwargs = kwargs or {}
        if func is torch.Tensor.__bool__ and args[0].dtype is torch.bool:
            return self._all_attended
        if func is torch.nn.functional.scaled_dot_product_attention and self._redirect_sdpa:
            return cuda_scaled_dot_product_attention(func, *args, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def like_a_real_run(*, packed: bool) -> Iterator[None]:
    """Stop transformers from recognizing fake tensors, which it would trace with other masks and no GQA.

    `packed` says whether the position ids pack several sequences into a row; only the real ones can tell.
    """
    from transformers import masking_utils
    from transformers.utils import import_utils

    find = masking_utils.find_packed_sequence_indices
    is_fake = import_utils.is_fake_tensor
    import_utils.is_fake_tensor = lambda tensor: False
    masking_utils.find_packed_sequence_indices = functools.partial(_packed_indices, packed)
    try:
        yield
    finally:
        import_utils.is_fake_tensor = is_fake
        masking_utils.find_packed_sequence_indices = find


def _packed_indices(packed: bool, position_ids: torch.Tensor) -> torch.Tensor | None:
    return torch.zeros_like(position_ids) if packed else None
