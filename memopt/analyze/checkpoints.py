"""Notice torch's own checkpoint in a forward: what runs inside of it saves nothing that a trace could see."""

import sys
from types import FrameType

import torch
from torch.utils import checkpoint


def is_inside_checkpoint() -> bool:
    """Tell whether torch's checkpoint, of either kind, sees to what is saved here."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None:
        pack = hooks[0]  # any callable: a partial has neither name
        owner = getattr(pack, "__module__", ""), getattr(pack, "__qualname__", "").partition(".")[0]
        if owner == (checkpoint.__name__, checkpoint._checkpoint_hook.__name__):
            return True
    return not torch.is_grad_enabled() and _is_inside_reentrant()


def _is_inside_reentrant() -> bool:
    """Tell whether a reentrant checkpoint is on the stack; it runs without grad, and leaves no hooks."""
    frame: FrameType | None = sys._getframe()
    code = checkpoint.CheckpointFunction.forward.__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
