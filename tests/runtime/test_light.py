"""Parts of which all is known are called lightly: what changes between their forward and backward still shows."""

import copy
import random

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import ReplayError, SavedTensorModifiedError
from tests.runtime.offloads import assert_same_step, forward_backward, recompute, rewritten
from tests.runtime.steps import assert_equal_gradients, gradients
from tests.runtime.test_recipes import Layer, Model, hidden

MOODS = set()
"""What norms do besides, from one call to the next, without a trace on them."""


@pytest.fixture(autouse=True)
def calm():
    yield
    MOODS.clear()


class Norm(nn.Module):
    """A norm of one's own: what it does depends on attributes and on a default dtype."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.scale = 1.0

    def forward(self, x):
        if MOODS & {"writes"}:
            x.mul_(2)
        if MOODS & {"draws"}:
            x = x * torch.rand_like(x)
        if MOODS & {"draws from Python"}:
            x = x * random.random()
        if MOODS & {"returns two"}:
            return torch.tanh(x) * self.weight, x
        y = torch.tanh(x * self.scale) * self.weight
        return y * (x.abs().mean(-1, keepdim=True) + 1) if self.training else y * 3


class Normed(Layer):
    def __init__(self, width=32):
        super().__init__(width=width)
        self.input_layernorm = Norm(width)

    def forward(self, x):
        return super().forward(x * 1)


@pytest.fixture
def light():
    """Return a plain model and a rewritten one whose norms are called lightly by now."""
    plain = Model(Normed)
    model, handle = rewritten(plain, recompute("layernorm"), hidden())
    for seed in range(3):
        assert_same_step(plain, model, hidden(seed))
    assert all(_known(layer).light for layer in model.layers)
    return plain, model, handle


def _known(layer):
    return layer.input_layernorm.__dict__["_memopt_habits"].known


def both(plain, model, change, x=None):
    """Run a forward of each, change something, run the backward; the gradients must be the same."""
    for one in (plain, model):
        one.zero_grad()
        torch.manual_seed(0)
        random.seed(0)
        loss = one(hidden() if x is None else x).sum()
        change(one)
        loss.backward()
    assert_equal_gradients(gradients(plain), gradients(model))


def norms(model):
    return [layer.input_layernorm for layer in model.layers]


def test_steps_stay_exact_and_each_part_is_replayed_once(light):
    plain, model, handle = light
    before = handle.stats()
    for seed in range(3):
        assert_same_step(plain, model, hidden(seed))
    after = handle.stats()
    assert after.checkpointed_calls - before.checkpointed_calls == after.replayed_calls - before.replayed_calls == 9


@pytest.mark.parametrize("seq_length", [1, 7, 16])
def test_other_shapes_are_learned_anew(light, seq_length):
    plain, model, _ = light
    for seed in range(3):
        assert_same_step(plain, model, hidden(seed)[:, :seq_length])
    assert len(_known(model.layers[0]).light) <= 2


def test_an_attribute_that_changes_before_backward(light):
    plain, model, _ = light

    def change(one):
        for norm in norms(one):
            norm.scale = 5.0

    both(plain, model, change)
    both(plain, model, lambda one: None)


def test_eval_before_backward(light):
    plain, model, _ = light
    both(plain, model, lambda one: one.eval())


def test_autocast_around_the_backward_and_around_the_forward(light):
    plain, model, _ = light
    for one in (plain, model):
        one.zero_grad()
        loss = one(hidden()).sum()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
    assert_equal_gradients(gradients(plain), gradients(model))
    for _ in range(3):
        for one in (plain, model):
            one.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = one(hidden()).float().sum()
            loss.backward()
        assert_equal_gradients(gradients(plain), gradients(model))


def test_frozen_and_thawed_before_backward(light):
    plain, model, _ = light

    def change(one):
        for norm in norms(one):
            norm.weight.requires_grad_(False)

    both(plain, model, change)


def test_a_parameter_that_is_written_to_before_backward_is_an_error(light):
    _, model, _ = light
    loss = model(hidden()).sum()
    with torch.no_grad():
        norms(model)[1].weight.mul_(2)
    with pytest.raises(SavedTensorModifiedError, match="a parameter of"):
        loss.backward()


def test_a_parameter_whose_data_is_replaced_before_backward_is_an_error(light):
    _, model, _ = light
    loss = model(hidden()).sum()
    norms(model)[1].weight.data = torch.zeros(32)
    with pytest.raises(ReplayError, match="replaced"):
        loss.backward()


@pytest.mark.parametrize(
    ("mood", "message"),
    [("writes", "argument as it was"), ("draws", "random"), ("draws from Python", "random")],
)
def test_a_part_that_begins_to_do_more_is_an_error_and_then_known(light, mood, message):
    plain, model, _ = light
    MOODS.add(mood)
    for _ in range(
        {"draws": 2, "draws from Python": 3}.get(mood, 1)
    ):  # in the first layer, whose input needs no grad, that saves no more
        with pytest.raises(ReplayError, match=message):
            model(hidden()).sum().backward()
    for _ in range(3):
        both(plain, model, lambda one: torch.manual_seed(7))


def test_an_optimizer_that_steps_in_between(light):
    plain, model, _ = light
    for one in (plain, model):
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(one.parameters(), lr=1e-4)
        for seed in range(4):
            optimizer.zero_grad()
            one(hidden(seed)).sum().backward()
            optimizer.step()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_retain_graph_and_gradients_of_gradients(light):
    plain, model, _ = light
    for one in (plain, model):
        one.zero_grad()
        x = hidden().requires_grad_()
        (grad,) = torch.autograd.grad(one(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward(retain_graph=True)
        grad.sum().backward()
    assert_equal_gradients(gradients(plain), gradients(model))


def test_no_grad_eval_and_undo(light):
    plain, model, handle = light
    with torch.no_grad():
        assert torch.equal(plain(hidden()), model(hidden()))
    loss = model(hidden()).sum()
    plain(hidden()).sum().backward()
    model.zero_grad()
    handle.undo()
    loss.backward()
    expected = copy.deepcopy(gradients(plain))
    plain.zero_grad()
    plain(hidden()).sum().backward()
    assert expected.keys() == gradients(model).keys()
    assert_equal_gradients(gradients(plain), gradients(model))
    memopt.undo(model)
    forward_backward(model, hidden())


@pytest.mark.parametrize("new_shapes", [False, True])
def test_a_part_that_draws_from_its_second_step_on(new_shapes):
    """It did not in the first step, and is not called lightly yet."""
    plain = Model(Normed)
    model, _ = rewritten(plain, recompute("layernorm"), hidden())
    for step in range(5):
        x = hidden(step)[:, : 16 - step if new_shapes else 16]
        both(plain, model, lambda one: torch.manual_seed(7), x)
        MOODS.add("draws")


def test_autocast_that_is_switched_on_and_off_between_steps(light):
    plain, model, _ = light
    for step in range(6):
        for one in (plain, model):
            one.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=step % 3 > 0):
                loss = one(hidden(step)).float().sum()
            loss.backward()
        assert_equal_gradients(gradients(plain), gradients(model))


def test_an_argument_made_in_inference_mode(light):
    plain, model, _ = light
    with torch.inference_mode():
        x = hidden()
    for one in (plain, model):
        one.zero_grad()
        one.layers[0].input_layernorm(x).sum().backward()
        (one.layers[1].one(one.layers[1].input_layernorm(hidden() + x.clone())) * 2).sum().backward()
    assert_equal_gradients(gradients(plain), gradients(model))


class CompiledInside(Norm):
    """A norm that compiles what it does."""

    def __init__(self, width):
        super().__init__(width)
        self.inner = torch.compile(_normed, backend="aot_eager")

    def forward(self, x):
        return self.inner(x, self.weight)


def _normed(x, weight):
    return torch.tanh(x) * weight * (x.abs().mean(-1, keepdim=True) + 1)


def test_a_norm_may_compile_what_it_does():
    class Compiled(Normed):
        def __init__(self, width=32):
            super().__init__(width=width)
            self.input_layernorm = CompiledInside(width)

    torch._dynamo.reset()
    plain = Model(Compiled)
    model, _ = rewritten(plain, recompute("layernorm"), hidden())
    for seed in range(5):
        assert_same_step(plain, model, hidden(seed))
    assert all(_known(layer).light for layer in model.layers)
