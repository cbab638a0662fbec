"""Make the routers of a real model choose as a trace takes them to: each row goes on where the last one ended."""

import torch
from torch.overrides import TorchFunctionMode


class BalancedRouting(TorchFunctionMode):
    """Call topk, and choose otherwise than it did."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "topk":
            self._balance(out.indices, *args, **(kwargs or {}))
        return out

    @staticmethod
    @torch.no_grad()
    def _balance(indices, scores, k, dim=-1, **options):
        rows = indices.data.movedim(dim, -1)  # its version stays: it may be saved for backward
        rows.copy_((torch.arange(rows.numel()) % scores.shape[dim]).view(rows.shape))
