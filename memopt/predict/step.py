"""Run training steps of a model on fake tensors and count what is alive."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from memopt.analyze.fake import TargetKernels, like_a_real_run, silent_torch
from memopt.analyze.values import InputValues
from memopt.predict.backend import FakeBackend
from memopt.predict.live import Use
from memopt.predict.mode import CountingMode, Timeline
from memopt.runtime.engine import Engine
from memopt.runtime.prediction import predicting

NUM_FORWARDS = 2
"""Until a rewritten model does what it does in every further step: it learns in the first, and follows in the third."""
_NO_CAP_BYTES = 1 << 62


class FakeSteps:
    """Steps of a model, rewritten or not, that lies on the fake tensors of a mode."""

    def __init__(
        self,
        model: nn.Module,
        mode: CountingMode,
        args: Any,
        kwargs: Mapping[str, Any],
        values: InputValues,
        target: str,
    ) -> None:
        self._model = model
        self._mode = mode
        self._call = args, kwargs
        self._values = values
        self._target = target
        for tensor in (*model.parameters(), *model.buffers()):
            mode.live.note(tensor, Use.PARAMETERS)

    def run(self, *, ends_at_once: bool) -> tuple[Timeline, Engine]:
        """Return the timeline of a step, and the engine with what was copied; copies end at once, or when waited for."""
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        engine = Engine(FakeBackend(device, ends_at_once=ends_at_once), cap_bytes=_NO_CAP_BYTES)
        with self._fake(engine):
            for _ in range(NUM_FORWARDS):
                self._mode.begin_step()
                self._forward()
            engine.finish()  # what the forwards before have on its way would be back in a step that went on
            timeline = self._mode.begin_step(self._model)
            assert timeline is not None
            self._backward(self._forward())
            self._mode.end_step()
        return timeline, engine

    def _forward(self) -> torch.Tensor:
        self._mode.use = Use.WORKSPACE
        args, kwargs = self._call
        loss = _loss_of(self._model(*args, **kwargs))
        self._mode.end_forward()
        return loss

    def _backward(self, loss: torch.Tensor) -> None:
        """Go through the graph; not by `backward`, which would take the modes that the trace needs off the stack."""
        engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        engine.run_backward(
            (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )

    @contextlib.contextmanager
    def _fake(self, engine: Engine) -> Iterator[None]:
        with (
            predicting(engine),
            silent_torch(),
            like_a_real_run(),
            self._mode,
            self._values,
            TargetKernels(self._target),
        ):
            yield


def _loss_of(output: Any) -> torch.Tensor:
    """Return the loss, else the mean of the first tensor."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    return next(t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, torch.Tensor)).float().mean()
