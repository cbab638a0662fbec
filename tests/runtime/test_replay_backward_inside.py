"""A forward that runs a backward inside of it: force fields, gradient penalties, implicit layers."""

import pytest
import torch
from torch import nn

from memopt.errors import BackwardInsideError, SavedTensorModifiedError
from tests.cases.rewriting import assert_trains_alike, recomputed
from tests.runtime.checkpoints import MODES

ROWS = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class Force(nn.Module):
    """Return the slope of an energy, and of a layer's own output."""

    def __init__(self, create_graph=True):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.create_graph = create_graph

    def forward(self, x):
        x = x if x.requires_grad else x.detach().requires_grad_()
        energy = torch.tanh(self.a(x)).square().sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=self.create_graph, retain_graph=True)
        return self.b(torch.tanh(self.a(x))) + slope.sin()


def pair(make, mode):
    torch.manual_seed(0)
    plain = nn.Sequential(make(), make())
    torch.manual_seed(0)
    model = nn.Sequential(make(), make())
    for one in model:
        recomputed(one, mode)
    return plain, model


def loss(model):
    return model(ROWS).square().sum()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_inside_are_exact(create_graph, mode):
    plain, model = pair(lambda: Force(create_graph), mode)
    assert_trains_alike(plain, model, loss, steps=4)


class Adds(Force):
    def forward(self, x):
        h = torch.tanh(self.a(x))
        h.sum().backward(retain_graph=True)
        return self.b(h)


@pytest.mark.parametrize("mode", MODES)
def test_a_backward_that_adds_to_gradients_is_an_error(mode):
    """The replay would add a second time."""
    _, model = pair(Adds, mode)
    for _ in range(2):
        with pytest.raises(
            BackwardInsideError, match="'Adds' runs a backward inside of it, which adds to .grad"
        ) as caught:
            loss(model)
        assert "take the module out of the plan" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_one_that_the_first_call_did_not_run_is_an_error():
    calls = []

    class Late(Force):
        def forward(self, x):
            calls.append(x)
            return super().forward(x) if len(calls) > 4 else torch.tanh(self.a(x))

    _, model = pair(Late, "full")
    loss(model).backward()
    calls.extend([None] * 9)
    with pytest.raises(BackwardInsideError, match="did not in its first call"):
        loss(model)


def test_what_is_written_to_before_it_is_an_error_as_in_autograd():
    class Writes(Force):
        def forward(self, x):
            h = torch.tanh(self.a(x))
            y = h.sin()
            h.data = h.data  # no write
            with torch.no_grad():
                h.mul_(2)
            return torch.autograd.grad(y.sum(), self.a.weight)[0].sum() + y

    for model, error in zip(pair(Writes, "full"), (RuntimeError, SavedTensorModifiedError), strict=True):
        with pytest.raises(error, match="modified by an inplace operation"):
            loss(model)
