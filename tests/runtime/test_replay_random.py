"""A replay draws what the forward drew, from whatever generator, and leaves the generator where the forward left it."""

import copy
import random

import numpy
import pytest
import torch
from torch import nn

from memopt.runtime.replay import random_streams
from tests.cases.rewriting import assert_identical, assert_trains_alike, recomputed, trained

GENERATORS = {
    "torch": lambda: torch.Generator().manual_seed(1),
    "python": lambda: random.Random(1),
    "numpy generator": lambda: numpy.random.default_rng(1),
    "numpy state": lambda: numpy.random.RandomState(1),
}


class Noisy(nn.Module):
    """Multiply by noise from a generator of its own, or from one that it is given."""

    def __init__(self, generator):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.generator = generator

    def forward(self, x, generator=None):
        generator = self.generator if generator is None else generator
        return self.lin(x * _draw(generator)).tanh() * _draw(generator)


class Stack(nn.Module):
    def __init__(self, generator, given):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Noisy(None if given else generator) for _ in range(3))
        self.given = generator if given else None

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, generator=self.given)
        return x.square().sum()


def _draw(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand(4, generator=generator)
    if isinstance(generator, random.Random):
        return torch.tensor([generator.random() for _ in range(4)])
    return torch.tensor([*generator.normal(size=3).tolist(), 1.0])  # an odd number: numpy keeps one normal back


@pytest.mark.parametrize("given", [False, True], ids=["attribute", "argument"])
@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_of_ones_own_is_rewound(kind, given):
    plain, model = (Stack(GENERATORS[kind](), given) for _ in range(2))
    for layer in model.layers:
        recomputed(layer, "full")
    x = torch.randn(2, 4)
    assert_trains_alike(plain, model, lambda m: m(x))


def test_one_normal_that_numpy_kept_back_is_drawn_again():
    """numpy makes normals in pairs: taking the second moves nothing but a flag."""
    numpy.random.seed(0)
    plain = Stack(numpy.random.mtrand._rand, given=False)
    model = Stack(numpy.random.mtrand._rand, given=False)
    for layer in model.layers:
        recomputed(layer, "full")
    x = torch.randn(2, 4)
    for seed in range(3):
        numpy.random.seed(seed)
        numpy.random.normal()
        want = trained(plain, lambda m: m(x), seed)
        numpy.random.seed(seed)
        numpy.random.normal()
        assert_identical(want, trained(model, lambda m: m(x), seed))


class DrawsFromNumpy(nn.Module):
    """Draw normals from numpy's global generator, of which it makes two at a time and keeps one back."""

    def __init__(self, num_normals):
        super().__init__()
        self.lin, self.num_normals = nn.Linear(4, 4), num_normals

    def forward(self, x):
        noise = numpy.random.normal(size=self.num_normals).sum() if self.num_normals else 1.0
        return self.lin(x.sin() * float(noise)).tanh()


@pytest.mark.parametrize("drawn_between", [0, 1, 2])
@pytest.mark.parametrize("drawn_before", [0, 1])
@pytest.mark.parametrize("num_normals", [0, 1, 2, 3])
def test_numpys_generator_is_where_the_step_left_it(num_normals, drawn_before, drawn_between):
    torch.manual_seed(0)
    plain = nn.Sequential(*(DrawsFromNumpy(num_normals) for _ in range(3)))
    model, x = copy.deepcopy(plain), torch.randn(2, 4)
    for layer in model:
        recomputed(layer, "full")
    results = []
    for one in (plain, model):
        numpy.random.seed(3)
        numpy.random.normal(size=drawn_before)
        results.append([])
        for _ in range(2):
            one.zero_grad()
            loss = one(x).square().sum()
            numpy.random.normal(size=drawn_between)
            loss.backward()
            results[-1] += [p.grad.clone() for p in one.parameters()]
        results[-1].append(torch.tensor(numpy.random.normal(size=3)))
    assert all(map(torch.equal, *results))


def test_the_state_of_a_global_generator_is_read_once_between_two_draws(monkeypatch):
    """It is dear to read; that nothing was drawn or set is seen in its memory, and in the normal that it keeps back."""
    stream = random_streams._PYTHON
    read = []
    monkeypatch.setattr(stream, "access", stream.access._replace(get=lambda: read.append(0) or random.getstate()))
    random.seed(5)
    first = stream.now()
    assert stream.now() is first
    assert len(read) == 1
    for draw in (random.random, lambda: random.gauss(0, 1), lambda: random.gauss(0, 1)):
        draw()
        assert stream.now()[1] == random.getstate()
    assert len(read) == 4


class DrawsNormal(nn.Module):
    """Multiply by a normal from a global generator, which keeps every second one back."""

    def __init__(self, draw):
        super().__init__()
        self.lin, self.draw = nn.Linear(4, 4), draw

    def forward(self, x):
        return self.lin(x).tanh() * self.draw()


GLOBAL = {
    "python": (random.gauss, (0, 1), random.getstate, random.setstate, random.seed),
    "numpy": (numpy.random.normal, (), numpy.random.get_state, numpy.random.set_state, numpy.random.seed),
}


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("kind", GLOBAL)
def test_a_normal_that_was_kept_back_comes_again_with_the_state(kind, policy):
    """The numbers are the same with it and without it."""
    normal, args, get, set_, seed = GLOBAL[kind]
    torch.manual_seed(0)
    plain = DrawsNormal(lambda: float(normal(*args)))
    model, x = copy.deepcopy(plain), torch.randn(3, 4)
    recomputed(model, policy)
    seed(0)
    normal(*args)
    with_normal = get()
    normal(*args)
    without_normal = get()
    for state in (without_normal, with_normal, with_normal, without_normal, with_normal):
        for one in (plain, model):
            set_(state)
            one.zero_grad()
            one(x).sum().backward()
            one.left = repr(get())
        assert torch.equal(plain.lin.weight.grad, model.lin.weight.grad)
        assert plain.left == model.left


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_another_kind_of_generator_in_numpy(policy):
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(1))
    try:
        plain = DrawsNormal(lambda: float(numpy.random.normal()))
        model, x = copy.deepcopy(plain), torch.randn(3, 4)
        recomputed(model, policy)
        for step in range(4):
            for one in (plain, model):
                numpy.random.set_bit_generator(numpy.random.PCG64(step))
                one.zero_grad()
                one(x).sum().backward()
            assert torch.equal(plain.lin.weight.grad, model.lin.weight.grad)
    finally:
        numpy.random.set_bit_generator(before)
