"""A forward that depends on what memopt does not restore is an error in the first step, never a wrong gradient."""

import functools
import itertools
import random
from dataclasses import dataclass
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

from memopt.errors import ReplayError
from memopt.runtime.replay.proof import Samples
from tests.cases.rewriting import assert_identical, recomputed, trained
from tests.runtime.checkpoints import Two


class Iterates(Two):
    def set_up(self):
        self.numbers = itertools.count(1)

    def factor(self, x):
        return next(self.numbers)


class Namespace(Two):
    def set_up(self):
        self.state = SimpleNamespace(n=1)

    def factor(self, x):
        self.state.n += 1
        return self.state.n


class Array(Two):
    def set_up(self):
        self.state = numpy.ones(8, dtype=numpy.float32)

    def factor(self, x):
        self.state += 1
        return torch.tensor(self.state)


class TensorInList(Two):
    def set_up(self):
        self.state = [torch.ones(8)]

    def factor(self, x):
        return self.state[0].add_(1).clone()


class Caches(Two):
    def set_up(self):
        self.cached = functools.lru_cache(float)

    def factor(self, x):
        return self.cached(2) + self.cached.cache_info().hits


class SystemRandom(Two):
    def set_up(self):
        self.random = random.SystemRandom()

    def factor(self, x):
        return 1 + self.random.random()


class OtherModule(Two):
    def set_up(self):
        self.other = (nn.Linear(8, 8),)

    def factor(self, x):
        self.other[0].scale = getattr(self.other[0], "scale", 1) + 1
        return self.other[0].scale


class WritesWeightData(Two):
    def factor(self, x):
        self.a.weight.data.mul_(0.5)
        return torch.tanh(self.a(x))


class ReplacesWeightData(Two):
    def factor(self, x):
        self.a.weight.data = functional.normalize(self.a.weight.data, dim=1) + 0.1
        return torch.tanh(self.a(x))


class Drops(Two):
    """Flags and integers too."""

    def set_up(self):
        self.seeds = itertools.count()

    def factor(self, x):
        generator = torch.Generator().manual_seed(next(self.seeds))
        return torch.rand(8, generator=generator) > 0.5


class HookOnOther(Two):
    def set_up(self):
        self.b.scale = 1.0
        self.a.peer = (self.b,)
        self.a.register_forward_hook(_scale_peer)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)) * self.b.scale)


def _scale_peer(module, args, output):
    module.peer[0].scale = float(output.detach().sum())


class ArgumentOfObject(Two):
    def forward(self, x):
        return super().forward(x) if isinstance(x, torch.Tensor) else self.b(x.take())


@dataclass
class Box:
    tensor: torch.Tensor

    def take(self):
        self.tensor = self.tensor + 1
        return self.tensor.tanh()


class TakesBox(Two):
    def set_up(self):
        self.inner = ArgumentOfObject()
        recomputed(self.inner, "full")

    def forward(self, x):
        return self.inner(Box(self.a(x)))


HIDDEN = [
    Iterates, Namespace, Array, TensorInList, Caches, SystemRandom, OtherModule, WritesWeightData, ReplacesWeightData, Drops,
    HookOnOther,
]  # fmt: skip


def pair(block, mode):
    torch.manual_seed(0)
    plain = nn.Sequential(block(), block())
    torch.manual_seed(0)
    model = nn.Sequential(block(), block())
    for one in model:
        recomputed(one, mode)
    return plain, model


def loss(model):
    return model(ROWS).square().sum()


ROWS = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("block", HIDDEN)
def test_hidden_state_is_an_error_in_the_first_step(block):
    _, model = pair(block, "full")
    value = loss(model)
    for _ in range(2):
        with pytest.raises(ReplayError, match="the replay of .* (computed other values|needs a parameter)") as caught:
            value.backward(retain_graph=True)
        assert "take the module out of the plan" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("block", [block for block in HIDDEN if block is not SystemRandom])
def test_hidden_state_is_exact_or_an_error_where_results_are_kept(block):
    plain, model = pair(block, "selective")
    want = trained(plain, loss, 0)
    try:
        got = trained(model, loss, 0)
    except ReplayError:
        return
    assert_identical(want, got)


def test_an_argument_that_the_layer_changes_is_an_error():
    model = TakesBox()
    with pytest.raises(ReplayError, match="other values"):
        loss(model).backward()


def test_a_model_that_is_changed_is_proved_again():
    class Switches(Two):
        def set_up(self):
            self.numbers, self.scales = itertools.count(1), False

        def factor(self, x):
            return next(self.numbers) if self.scales else 1

    _, model = pair(Switches, "full")
    for _ in range(2):
        loss(model).backward()
    model[1].scales = True
    with pytest.raises(ReplayError, match="other values"):
        loss(model).backward()


def test_it_is_proved_by_the_first_backward_not_by_the_first_forward():
    _, model = pair(Iterates, "full")
    loss(model)
    with pytest.raises(ReplayError, match="other values"):
        loss(model).backward()


def test_what_an_operation_fills_after_it_saves_it_is_no_false_alarm():
    class Norm(Two):
        def set_up(self):
            self.norm, self.noise = nn.BatchNorm1d(8), nn.RReLU()

        def forward(self, x):
            h = self.noise(self.norm(self.a(x)))
            return self.b(h)

    plain, model = pair(Norm, "full")
    for seed in range(3):
        assert_identical(trained(plain, loss, seed), trained(model, loss, seed))


SAME = {
    "equal": (torch.arange(1000.0), torch.arange(1000.0)),
    "last bits": (torch.ones(99), torch.ones(99) + 1e-3),
    "no number": (torch.tensor([1.0, torch.nan, -torch.inf]), torch.tensor([1.0, torch.nan, -torch.inf])),
    "zeros": (torch.zeros(5), torch.zeros(5)),
    "any strides": (torch.arange(9900.0).view(99, 100).t(), torch.arange(9900.0).view(99, 100).t().contiguous()),
    "few integers of many": (torch.arange(60), torch.arange(60).index_fill(0, torch.tensor([3]), 7)),
    "a seed that was left unset": (torch.tensor(5), torch.tensor(6)),
    "bytes": (torch.zeros(99, dtype=torch.uint8), torch.ones(99, dtype=torch.uint8)),
    "empty": (torch.ones(0, 3), torch.ones(0, 3)),
    "a subclass": (torch.ones(3).as_subclass(type("Other", (torch.Tensor,), {})), torch.ones(3)),
    "sparse": (torch.eye(3).to_sparse(), 2 * torch.eye(3).to_sparse()),
}
OTHER = {
    "scaled": (torch.arange(1000.0), 1.1 * torch.arange(1000.0)),
    "half precision": (torch.ones(99).bfloat16(), 1.1 * torch.ones(99).bfloat16()),
    "zeros": (torch.zeros(5), torch.full((5,), 1e-9)),
    "no number": (torch.ones(5), torch.full((5,), torch.nan)),
    "infinite": (torch.full((5,), -torch.inf), torch.ones(5)),
    "a column": (torch.zeros(64, 64), torch.zeros(64, 64).index_fill(1, torch.arange(5, 15), 1.0)),
    "few integers": (torch.arange(4), torch.tensor([0, 1, 2, 4])),
    "many integers": (torch.arange(900), torch.arange(900) % 700),
    "flags": (torch.ones(50, dtype=torch.bool), torch.arange(50) > 9),
}


@pytest.mark.parametrize("name", SAME)
def test_samples_that_are_alike(name):
    one, other = SAME[name]
    Samples({3: one}).check("layer", {3: other})


@pytest.mark.parametrize("name", OTHER)
def test_samples_that_are_not_alike(name):
    one, other = OTHER[name]
    with pytest.raises(ReplayError, match="for saved tensor 3, of shape"):
        Samples({3: one}).check("layer", {3: other})
