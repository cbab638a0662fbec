"""Devices that tensors can be swapped from, behind one small protocol."""

import torch

from memopt.runtime.backends.accelerator import AcceleratorBackend
from memopt.runtime.backends.base import Backend, Copies, Event
from memopt.runtime.backends.cpu import CpuBackend

__all__ = ["AcceleratorBackend", "Backend", "Copies", "CpuBackend", "Event", "backend_for"]


def backend_for(device: torch.device) -> Backend:
    """Return a new backend for a device."""
    return CpuBackend() if device.type == "cpu" else AcceleratorBackend(device)
