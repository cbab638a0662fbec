"""What the tests on a GPU share: its rehearsal on the CPU, and what is put where."""

import torch

from tests import models


def moved(thing, device):
    if isinstance(thing, dict):
        return {key: moved(value, device) for key, value in thing.items()}
    return thing.to(device) if isinstance(thing, (torch.Tensor, torch.nn.Module)) else thing


def batch(device, **options):
    """Return a batch, on a CPU a short one."""
    return moved(models.batch(**({"seq_length": 512 if device.type == "cuda" else 32} | options)), device)
