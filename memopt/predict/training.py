"""What becomes of the gradients in a predicted step: they stay, or an optimizer takes them."""

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memopt.ir import OPTIMIZERS, Use
from memopt.predict.mode import CountingMode

_CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"fused": True}),
    "sgd": (torch.optim.SGD, {"foreach": True}),
}
"""As torch makes them for parameters on a CUDA device."""
assert {*_CLASSES, "none"} == set(OPTIMIZERS)


class Training:
    """The trained parameters of a model on fake tensors, with the state of their optimizers."""

    def __init__(self, model: nn.Module, mode: CountingMode, optimizer: str, *, in_backward: bool) -> None:
        self._mode = mode
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._in_backward = in_backward
        groups = [[p] for p in self._parameters] if in_backward else [self._parameters]
        self._optimizers = [_make(optimizer, group) for group in groups if group] if optimizer != "none" else []
        self._of = (
            dict[torch.Tensor, torch.optim.Optimizer](zip(self._parameters, self._optimizers, strict=True))
            if in_backward and self._optimizers
            else {}
        )
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    def prepare(self) -> None:
        """Make the optimizers' state, as a step before would have; to be called where operators are answered."""
        with self._uncounted():
            for parameter in self._parameters if self._optimizers else ():
                parameter.grad = torch.empty_like(parameter)
            for optimizer in self._optimizers:
                optimizer.step()
            self.drop_gradients()
        for tensor in self._states():
            self._mode.live.note(tensor, Use.OPTIMIZER)

    def step(self) -> None:
        """Step after backward, where that is not done in it."""
        if not self._in_backward:
            for optimizer in self._optimizers:
                optimizer.step()

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def _accumulated(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._mode.live.is_for(parameter.grad, Use.GRADIENTS)
        if self._in_backward:
            if parameter in self._of:
                self._of[parameter].step()
            parameter.grad = None

    def _states(self) -> list[torch.Tensor]:
        """Return what the optimizers keep on the device: not the counts of steps, which are on the host unless fused."""
        states = (value for o in self._optimizers for state in o.state.values() for value in state.values())
        is_fused = any(optimizer.defaults.get("fused") for optimizer in self._optimizers)
        return [t for t in states if isinstance(t, torch.Tensor) and (t.dim() or is_fused)]

    @contextmanager
    def _uncounted(self) -> Any:
        used, self._mode.use = self._mode.use, None
        try:
            yield
        finally:
            self._mode.use = used


def _make(name: str, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    made, options = _CLASSES[name]
    optimizer: torch.optim.Optimizer = made(parameters, lr=1e-3, **options)
    return optimizer
