"""A step on fake tensors takes, operator by operator, the bytes that a real one takes."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt.analyze.inputs import fake_arguments
from memopt.analyze.twin import twin_of_model
from memopt.analyze.values import InputValues
from memopt.predict.live import LiveBytes, Use
from memopt.predict.mode import CountingMode
from memopt.predict.step import FakeSteps
from tests import zoo


class Counting(TorchDispatchMode):
    """Count what real operators make."""

    def __init__(self, live):
        super().__init__()
        self.live, self.totals = live, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.live.note(tensor, Use.WORKSPACE)
        self.totals.append(self.live.total)
        return out


def real_totals(model, inputs, num_steps=3):
    """Return what is alive after each operator of the last of some steps, parameters and inputs left out."""
    for _ in range(num_steps - 1):
        model(**inputs).loss.backward()
        model.zero_grad()
    with Counting(LiveBytes()) as counting:
        model(**inputs).loss.backward()
    return counting.totals


def predicted_totals(plain, inputs, config):
    mode = CountingMode()
    twin = twin_of_model(plain, mode)
    values = InputValues(mode)
    _, kwargs = fake_arguments(((), inputs), values, mode)
    if config:
        memopt.apply(twin, memopt.plan(memopt.analyze(plain, inputs), config))
    return FakeSteps(twin, mode, (), kwargs, values, "cpu").run(ends_at_once=True)[0].totals


@pytest.mark.parametrize(
    "config", [None, {"activation_checkpoint": "full"}, {"activation_checkpoint": "selective"}], ids=str
)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_alive_after_each_operator_is_what_a_real_step_has(name, config):
    plain, inputs = zoo.ZOO[name](), zoo.batch(name, use_cache=False)
    predicted = predicted_totals(copy.deepcopy(plain), inputs, config)
    if config:
        memopt.apply(plain, config, inputs)
    real = real_totals(plain, inputs)
    print(len(predicted), len(real), max(predicted), max(real))
    assert predicted == real
