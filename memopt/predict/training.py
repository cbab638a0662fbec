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

    def __init__(
        self, model: nn.Module, mode: CountingMode, optimizer: str, *, in_backward: bool, accumulates: bool = False
    ) -> None:
        self._mode = mode
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._in_backward = in_backward
        self._accumulates = accumulates
        groups = [[p] for p in self._parameters] if in_backward else [self._parameters]
        self._optimizers = [_make(optimizer, group) for group in groups if group] if optimizer != "none" else []
        self._of = (
            dict[torch.Tensor, torch.optim.Optimizer](zip(self._parameters, self._optimizers, strict=True))
            if in_backward and self._optimizers
            else {}
        )
        self._reached: set[torch.Tensor] = set()
        """The parameters that the last step had a gradient for: of others an optimizer keeps nothing."""
        self._hooks = [p.register_post_accumulate_grad_hook(self._accumulated) for p in self._parameters]

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

    def begin(self) -> None:
        """Have the gradients of the steps before, where they add up; to be called before the step's first operator."""
        for parameter in self._parameters if self._accumulates else ():
            parameter.grad = torch.empty_like(parameter)
            self._mode.live.is_for(parameter.grad, Use.GRADIENTS)

    def step(self) -> None:
        """Step after backward, where that is not done in it."""
        for parameter in self._parameters:
            if parameter not in self._reached:
                self._never_trains(parameter)
        if not self._in_backward:
            for optimizer in self._optimizers:
                optimizer.step()

    def end(self) -> None:
        """Forget all gradients, of a step and of those before."""
        self.drop_gradients()
        self._parameters = [p for p in self._parameters if p in self._reached]
        self._reached = set()

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def close(self) -> None:
        """Watch the parameters no more: torch would keep the hooks, and all they know, for good."""
        for hook in self._hooks:
            hook.remove()

    def _accumulated(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._reached.add(parameter)
        self._mode.live.is_for(parameter.grad, Use.GRADIENTS)
        if self._in_backward:
            if parameter in self._of:
                self._of[parameter].step()
            parameter.grad = None

    def _never_trains(self, parameter: torch.Tensor) -> None:
        """Take back what was there for a parameter that no step has a gradient for: other models' parts, frozen by use."""
        states = [state for o in self._optimizers for state in [o.state.pop(parameter, {})]]
        found = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        for tensor in (*found, *([] if parameter.grad is None else [parameter.grad])):
            self._mode.live.never_was(tensor)
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
