"""Run training steps of a model on fake tensors and count what is alive."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memopt.analyze.fake_run import FakeRun, device_type
from memopt.errors import RequestError
from memopt.ir import Phase, Use
from memopt.predict.backend import FakeBackend
from memopt.predict.mode import CountingMode
from memopt.predict.timeline import Timeline
from memopt.predict.training import Training
from memopt.runtime.engine import Engine
from memopt.runtime.prediction import predicting

_NO_CAP_BYTES = 1 << 62


class FakeSteps:
    """Steps of a model, rewritten or not, that lies on the fake tensors of a mode."""

    def __init__(
        self,
        run: FakeRun,
        *,
        optimizer: str = "none",
        grad_in_backward: bool = False,
        accumulate_gradients: bool = False,
    ) -> None:
        assert isinstance(run.mode, CountingMode)
        self._run = run
        self._mode = run.mode
        self._mode.is_of(torch.device(device_type(run.twin)))
        for tensor in (*run.twin.parameters(), *run.twin.buffers()):
            self._mode.live.note(tensor, Use.PARAMETERS)
        for tensor in tree_leaves((run.args, run.kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._mode.live.note(tensor, Use.ACTIVATIONS)
        self._training = Training(
            run.twin, self._mode, optimizer, in_backward=grad_in_backward, accumulates=accumulate_gradients
        )
        try:
            with run.on_fakes():
                self._training.prepare()
        except BaseException:
            self.close()
            raise

    def step(self, *, ends_at_once: bool = True, num_forwards: int = 0) -> tuple[Timeline, Engine]:
        """Return the timeline of a step, and the engine with what was copied.

        Copies out end at once, or when somebody waits for them. A rewritten model learns in its first calls: after two
        forwards it does what it does in every further step.
        """
        device = torch.device(device_type(self._run.twin))
        backend = FakeBackend(device, ends_at_once=ends_at_once, came_back=self._came_back)
        engine = Engine(backend, cap_bytes=_NO_CAP_BYTES)
        self._mode.use = Use.WORKSPACE
        with predicting(engine), self._run.on_fakes():
            self._warm_up(num_forwards)
            engine.finish()  # what the forwards before have on its way would be back in a step that went on
            self._training.begin()
            timeline = self._mode.begin_step(self._run.twin)
            self._train(timeline)
            self._mode.end_step()
            self._training.end()
        return timeline, engine

    def close(self) -> None:
        """Let go of the model."""
        self._training.close()

    def _warm_up(self, num_forwards: int) -> None:
        """Run forwards, in which regions learn; and backward, if a model keeps what belongs to a graph until the next one.

        Only a backward frees what that graph has saved, and a region does not skip what is still to be proven.
        """
        before, keeps = self._mode.live.total, False
        for _ in range(num_forwards):
            loss = self._forward()
            if keeps:
                run_backward(loss)
            del loss
            keeps = self._mode.live.total > before
        self._training.drop_gradients()

    def _train(self, timeline: Timeline) -> None:
        loss = self._forward()
        self._mode.live.rest_is_for(Use.ACTIVATIONS, instead_of=Use.WORKSPACE)
        timeline.enter(Phase.BACKWARD)
        run_backward(loss)
        del loss
        timeline.enter(Phase.OPTIMIZER)
        self._training.step()

    def _forward(self) -> torch.Tensor:
        with self._run.autocasting():
            return loss_of(self._run.twin(*self._run.args, **self._run.kwargs))

    def _came_back(self, target: torch.Tensor) -> None:
        self._mode.live.is_for(target, Use.ACTIVATIONS)


def run_backward(loss: torch.Tensor) -> None:
    """Go through the graph; not by `backward`, which would take the modes that the trace needs off the stack."""
    engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    with torch.autograd.set_multithreading_enabled(False):  # a device's own thread would not know of the prediction
        engine.run_backward(
            (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss, else the mean of the first tensor."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
    if not tensors:
        raise RequestError("the model's forward returns no tensor: there is nothing that backward could begin with")
    return tensors[0].float().mean()
