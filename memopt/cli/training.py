"""Train a few steps and write down what can be compared: losses, gradients, time, memory."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from memopt.errors import RequestError

LEARNING_RATE = 1e-2


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a few training steps gave, on the CPU."""

    losses: tuple[torch.Tensor, ...]
    gradients: tuple[Mapping[str, torch.Tensor], ...]
    """Of every parameter that has one, a mapping a step."""
    step_seconds: float
    """The median."""
    peak_device_bytes: int | None
    """None on the CPU, which keeps no such count."""

    @property
    def any_nan(self) -> bool:
        """Whether a loss is NaN."""
        return any(bool(loss.isnan().any()) for loss in self.losses)


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy on the CPU of a model's parameters and buffers, from which `train` starts."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in _tensors(model)}


def train(
    model: nn.Module,
    start: Mapping[str, torch.Tensor],
    batches: Sequence[Mapping[str, Any]],
    *,
    autocast: str = "none",
    seed: int = 0,
    say: Callable[[str], None] = lambda doing: None,
) -> Run:
    """Train a step a batch with SGD, from the same weights and random state each time."""
    device = next(model.parameters()).device
    _restore(model, start)
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    _reset_peak(device)
    losses, gradients, seconds = [], [], []
    for number, batch in enumerate(batches, 1):
        say(f"step {number} of {len(batches)}")
        loss, step_gradients, took = _step(model, batch, optimizer, autocast)
        losses.append(loss)
        gradients.append(step_gradients)
        seconds.append(took)
    return Run(
        losses=tuple(losses),
        gradients=tuple(gradients),
        step_seconds=median(seconds),
        peak_device_bytes=_peak(device),
    )


def _step(
    model: nn.Module, batch: Mapping[str, Any], optimizer: torch.optim.Optimizer, autocast: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor], float]:
    """Train one step; returns its loss and gradients on the CPU, and the seconds without those of copying them."""
    device = next(model.parameters()).device
    began = _now(device)
    loss = _forward(model, batch, device, autocast)
    loss.backward()
    took = _now(device) - began
    gradients = {n: p.grad.cpu().clone() for n, p in model.named_parameters() if p.grad is not None}
    began = _now(device)
    optimizer.step()
    optimizer.zero_grad()
    took += _now(device) - began
    return loss.detach().cpu(), gradients, took


def _forward(model: nn.Module, batch: Mapping[str, Any], device: torch.device, autocast: str) -> torch.Tensor:
    with _autocast(device, autocast):
        loss = getattr(model(**batch), "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise RequestError(f"{type(model).__name__} returns no loss: it cannot be trained here")
    return loss


def _autocast(device: torch.device, dtype: str) -> AbstractContextManager[Any]:
    return nullcontext() if dtype == "none" else torch.autocast(device.type, getattr(torch, dtype))


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _restore(model: nn.Module, start: Mapping[str, torch.Tensor]) -> None:
    model.zero_grad()
    with torch.no_grad():
        for name, tensor in _tensors(model):
            tensor.copy_(start[name])


def _now(device: torch.device) -> float:
    """Return the time once all that was asked of the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _reset_peak(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int | None:
    return None if device.type == "cpu" else int(torch.accelerator.max_memory_allocated(device))
