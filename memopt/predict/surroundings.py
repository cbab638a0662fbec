"""Predict as a training loop would run, whatever is switched on where the prediction is asked for."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from memopt.errors import RequestError


@contextmanager
def plain_surroundings() -> Iterator[None]:
    """Train for a while without autocast, inference mode or the search for anomalies around it.

    Raises RequestError within saved-tensor hooks, which would get what the prediction saves.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise RequestError(
            "memory is predicted within torch.autograd.graph.saved_tensors_hooks (as save_on_cpu sets); call it outside"
        )
    accelerator = torch.accelerator.current_accelerator()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        for device in {"cpu", *([accelerator.type] if accelerator else [])}:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
