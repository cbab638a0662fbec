"""Measure a device: how fast it computes, moves its memory and copies, and what CUDA's libraries take of it."""

import time
from collections.abc import Callable

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memopt.ir import DeviceProfile
from memopt.units import MIB

_SIDE = 8192
_COPY_BYTES = 256 * MIB
_REPEATS = 10


def measure_device(device: torch.device) -> DeviceProfile:
    """Return the profile of an accelerator, measured in a few seconds; it takes 2 GiB of its memory meanwhile."""
    properties = torch.get_device_module(device).get_device_properties(device)
    out_rate, in_rate = _copy_rates(device)
    return DeviceProfile(
        name=properties.name,
        memory_bytes=properties.total_memory,
        half_flops=_product_rate(device, torch.bfloat16),
        single_flops=_product_rate(device, torch.float32),
        bytes_per_second=_memory_rate(device),
        copy_out_bytes_per_second=out_rate,
        copy_in_bytes_per_second=in_rate,
        library_bytes=library_bytes(device),
        launch_us=_launch_us(device),
        is_measured=True,
    )


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    side = _SIDE if dtype is torch.bfloat16 else _SIDE // 2
    one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / _seconds(lambda: one @ other, device)


def _memory_rate(device: torch.device) -> float:
    one, other = (torch.ones(_COPY_BYTES, device=device, dtype=torch.uint8) for _ in range(2))
    return 3 * _COPY_BYTES / _seconds(lambda: one.add_(other), device)


def _copy_rates(device: torch.device) -> tuple[float, float]:
    there = torch.empty(_COPY_BYTES, device=device, dtype=torch.uint8)
    here = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    out = _COPY_BYTES / _seconds(lambda: here.copy_(there, non_blocking=True), device)
    return out, _COPY_BYTES / _seconds(lambda: there.copy_(here, non_blocking=True), device)


def library_bytes(device: torch.device) -> int:
    """Return what stays allocated after a forward and a backward through a product, when all workspaces were dropped."""
    layer, rows = (
        nn.Linear(256, 256, device=device, dtype=torch.bfloat16),
        torch.randn(64, 256, device=device).bfloat16(),
    )
    torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]
    layer.weight.grad = layer.bias.grad = None
    before = torch.accelerator.memory_allocated(device)
    layer(rows).sum().backward()
    torch.accelerator.synchronize(device)
    layer.weight.grad = layer.bias.grad = None
    return int(torch.accelerator.memory_allocated(device) - before)


def _launch_us(device: torch.device) -> float:
    """Return the host's time for an operator, in training steps of a model whose kernels take next to none."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.SiLU()) for _ in range(64)]
    model, rows = nn.Sequential(*layers).to(device), torch.randn(16, 64, device=device)

    def step() -> None:
        model(rows).sum().backward()

    step()
    with _Count() as counting:
        step()
    return 1e6 * _seconds(step, device) / counting.num_operators


class _Count(TorchDispatchMode):
    num_operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.num_operators += 1
        return func(*args, **(kwargs or {}))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return how long a piece of work takes, done many times over."""
    for _ in range(3):
        work()
    torch.accelerator.synchronize(device)
    began = time.perf_counter()
    for _ in range(_REPEATS):
        work()
    torch.accelerator.synchronize(device)
    return (time.perf_counter() - began) / _REPEATS
