"""What a region finds changed, or changes, between its forward and its replay: programs that went wrong once."""

import copy
import random
import weakref
from collections import Counter, OrderedDict, deque

import pytest
import torch
from torch import nn
from torch.nn import functional

from memopt.errors import ReplayError, SavedTensorModifiedError
from memopt.runtime.replay import run as run_module
from tests.cases.rewriting import assert_trains_alike, recomputed
from tests.runtime.checkpoints import Two


class WritesToAttribute(Two):
    def set_up(self):
        self.t = torch.ones(8)

    def factor(self, x):
        self.t.add_(1)
        return self.t.clone()


class WritesToSharedBuffer(Two):
    def set_up(self):
        shared = torch.ones(8)
        self.a.register_buffer("q", shared)
        self.b.register_buffer("q", shared)

    def factor(self, x):
        self.a.q.add_(1)
        return self.b.q.clone()


class Counts(Two):
    def set_up(self):
        self.counter, self.queue = Counter(), deque([1.0, 2.0])

    def factor(self, x):
        self.counter["calls"] += 1
        self.queue.rotate()
        return self.queue[0] + self.counter["calls"]


class CountsDeepInside(Two):
    def set_up(self):
        shared = {"calls": 1}
        self.state = {"all": [shared, (shared, deque([{"calls": 2}]))]}
        self.state["itself"] = self.state

    def factor(self, x):
        first, (same, queue) = self.state["itself"]["all"]
        same["calls"] += 1
        queue[0]["calls"] += first["calls"]
        return queue[0]["calls"]


class DrawsFromGeneratorInList(Two):
    def set_up(self):
        self.generators = []

    def factor(self, x):
        if not self.generators:
            self.generators.append({"own": torch.Generator().manual_seed(1)})
        return torch.randn(8, generator=self.generators[0]["own"])


class ForksTheStream(Two):
    def factor(self, x):
        with torch.random.fork_rng(devices=[]):
            return torch.randn(x.shape)


class PutsTheStreamBack(Two):
    def factor(self, x):
        state = random.getstate()
        value = random.random()
        random.setstate(state)
        return value


class SeedsAndPutsBack(Two):
    def factor(self, x):
        state = torch.get_rng_state()
        torch.manual_seed(3)
        noise = torch.randn(x.shape)
        torch.set_rng_state(state)
        return noise


class TrainsStatisticsLater(Two):
    def set_up(self):
        self.calls = 0
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def factor(self, x):
        self.calls += 1
        return functional.batch_norm(x, self.mean, self.var, training=self.calls > 1)


class TriesTwice(Two):
    def factor(self, x):
        try:
            return functional.linear(x, torch.eye(3))
        except RuntimeError:
            return functional.linear(x, torch.eye(8))


def _pair(block, policy):
    torch.manual_seed(0)
    random.seed(0)
    plain = nn.Sequential(block(), block())
    torch.manual_seed(0)
    model = nn.Sequential(block(), block())
    for one in model:
        recomputed(one, policy)
    return plain, model


def _loss(x):
    return lambda model: model(x).square().sum()


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize(
    "block",
    [
        WritesToAttribute, WritesToSharedBuffer, Counts, CountsDeepInside, DrawsFromGeneratorInList, ForksTheStream,
        PutsTheStreamBack, SeedsAndPutsBack,
        TrainsStatisticsLater, TriesTwice,
    ],
)  # fmt: skip
def test_a_replay_finds_what_the_forward_found(block, policy):
    plain, model = _pair(block, policy)
    assert_trains_alike(plain, model, _loss(torch.randn(3, 8)), steps=4)
    for want, got in zip(plain.buffers(), model.buffers(), strict=True):
        assert torch.equal(want, got)


class WritesThroughView(Two):
    def set_up(self):
        self.register_buffer("whole", torch.ones(8))
        self.register_buffer("part", self.whole[:4])

    def factor(self, x):
        self.part.add_(1)
        return self.whole.clone()


def test_a_buffer_that_is_written_through_another_is_an_error():
    _, model = _pair(WritesThroughView, "full")
    loss = _loss(torch.randn(3, 8))(model)
    with pytest.raises(ReplayError, match="view"):
        loss.backward()


class TakesWeight(nn.Module):
    def forward(self, x, weight):
        return torch.tanh(functional.linear(x, weight)).square()


class ReadOnly(dict):
    def __setitem__(self, key, value):
        raise TypeError("read only")


class Named(tuple):
    """A tuple with attributes."""


class TakesOddArguments(Two):
    def forward(self, x, options, queue, named):
        return super().forward(queue.popleft() * options["scale"]) * named.scale + named[0]


class GivesOddArguments(Two):
    def set_up(self):
        self.inner = TakesOddArguments()

    def forward(self, x):
        named = Named((x,))
        named.scale = 3.0
        return self.inner(x, ReadOnly(scale=x.detach() + 2), deque([self.a(x)]), named)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_arguments_that_are_odd_containers(policy):
    torch.manual_seed(0)
    plain, model = GivesOddArguments(), GivesOddArguments()
    model.load_state_dict(plain.state_dict())
    recomputed(model.inner, policy)
    assert_trains_alike(plain, model, _loss(torch.randn(3, 8)))


def test_a_weight_whose_data_was_replaced_before_backward_is_an_error():
    """Autograd has the old data still, and a replay would not."""
    _, model = _pair(Two, "full")
    loss = _loss(torch.randn(3, 8))
    loss(model).backward()
    value = loss(model)
    model[1].a.weight.data = 1.001 * model[1].a.weight.data
    with pytest.raises(ReplayError, match=r"parameter of shape \[8, 8\] whose .data was replaced"):
        value.backward()


def test_a_weight_that_was_passed_and_written_to_is_an_error():
    weight, layer = nn.Parameter(torch.eye(8)), TakesWeight()
    recomputed(layer, "full")
    loss = layer(torch.randn(3, 8), weight).sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(SavedTensorModifiedError):
        loss.backward()


class FailsInBackward(torch.autograd.Function):
    fails = True

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if FailsInBackward.fails:
            raise ValueError("no")
        return grad


def test_a_weight_that_was_written_to_after_a_failed_backward_is_an_error():
    _, model = _pair(Two, "full")
    x = torch.randn(3, 8, requires_grad=True)
    loss = model(FailsInBackward.apply(x)).square().sum()
    FailsInBackward.fails = True
    with pytest.raises(ValueError, match="no"):
        loss.backward(retain_graph=True)
    with torch.no_grad():
        model[0].a.weight.mul_(2)
    with pytest.raises(SavedTensorModifiedError):
        loss.backward()


def test_hooks_that_write_to_a_buffer_are_called_in_the_replay():
    class Hooked(Two):
        def set_up(self):
            self.a.register_buffer("s", torch.ones(8))
            self.a.register_forward_pre_hook(_write)

        def factor(self, x):
            return self.a.s.clone()

    plain, model = _pair(Hooked, "full")
    assert_trains_alike(plain, model, _loss(torch.randn(3, 8)))
    assert torch.equal(plain[0].a.s, model[0].a.s)


def _write(module, args):
    module.s.add_(1)


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("frozen_first", [False, True])
def test_parameters_that_are_frozen_or_freed_before_backward(policy, frozen_first):
    """As a GAN does, or adapters that take turns; shapes are such that another save would fit in the place of one."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(Two() for _ in range(3)))
    model, x = copy.deepcopy(plain), torch.randn(8, 8)
    for layer in model:
        recomputed(layer, policy)
    for _ in range(4):
        for one in (plain, model):
            one.zero_grad()
            weight = one[1].a.weight
            weight.requires_grad_(not frozen_first)
            loss = one(x).square().mean()
            weight.requires_grad_(frozen_first)
            loss.backward()
            assert weight.requires_grad == frozen_first
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert p.grad is q.grad is None or torch.equal(p.grad, q.grad)


class Remembers(Two):
    """Keep an output on the module, as models do with router logits."""

    def set_up(self):
        self.last = None

    def factor(self, x):
        self.last = x.exp().detach()
        return self.last


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_tensor_that_each_call_replaces_is_nothing_new_to_learn(policy, monkeypatch):
    torch.manual_seed(0)
    plain = Remembers()
    model, x = copy.deepcopy(plain), torch.randn(8, 8)
    recomputed(model, policy)
    learned = []
    monkeypatch.setattr(
        run_module.Known, "forget", lambda known, forget=run_module.Known.forget: learned.append(forget(known))
    )
    for _ in range(5):
        for one in (plain, model):
            one.zero_grad()
            one(x).square().mean().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
        assert torch.equal(plain.last, model.last)
    assert len(learned) == 2, "at first, and when the tensor appeared"


class RemembersLater(Two):
    """Keep an output on the module with its graph, but not in the first calls."""

    def set_up(self):
        self.calls, self.last = [], torch.ones(8, 8)

    def factor(self, x):
        self.calls.append(0)
        if len(self.calls) > 3:
            self.last = x.exp() + self.last.detach()
        return self.last


def _set_parameters(model):
    """Give a child another dict of parameters, as DeepSpeed does, with another parameter in it."""
    model.a._parameters = {name: nn.Parameter(p.detach() + 1) for name, p in model.a._parameters.items()}


def _freeze_dropout(model):
    model.b.eval()


def _add_child(model):
    model.b.extra = nn.Linear(8, 8, bias=False)


def _drop_hooks(model):
    """Take all hooks off a child as many programs do, and put another there."""
    model.b._forward_hooks = OrderedDict()
    model.b.register_forward_hook(lambda module, args, output: output * 2)


def _rename(model):
    """Give an attribute another name, value and place being the same."""
    del model.warm
    model.hot = True


def _move_to_neighbor(model):
    del model.a.active
    model.b.active = True


def _replace_dict(model):
    model.__dict__ = dict(model.__dict__)
    model.scale = 3.0


class LooksAround(Two):
    """Two products, and between them a factor that depends on what its modules have by name."""

    def set_up(self):
        self.scale, self.warm = 1.0, True
        self.b = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        self.a.active = True

    def factor(self, x):
        return self.scale * (2 if hasattr(self, "warm") else 3) * (5 if hasattr(self.a, "active") else 7)


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize(
    "change",
    [_set_parameters, _freeze_dropout, _add_child, _drop_hooks, _rename, _move_to_neighbor, _replace_dict],
)
@pytest.mark.parametrize("when", ["before the forward", "before the backward"])
def test_modules_that_change_after_they_were_learned(change, policy, when):
    torch.manual_seed(0)
    plain = LooksAround()
    model, x = copy.deepcopy(plain), torch.randn(8, 8)
    recomputed(model, policy)
    for step in range(6):
        for one in (plain, model):
            one.zero_grad()
            torch.manual_seed(step)
            if step == 3 and when == "before the forward":
                change(one)
            loss = one(x).square().mean()
            if step == 3 and when == "before the backward" and change is not _set_parameters:
                change(one)
            loss.backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert p.grad is q.grad is None or torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_region_that_comes_to_replace_a_tensor(policy):
    torch.manual_seed(0)
    plain = RemembersLater()
    model, x = copy.deepcopy(plain), torch.randn(8, 8)
    recomputed(model, policy)
    for _ in range(7):
        for one in (plain, model):
            one.zero_grad()
            one(x).square().mean().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
        assert torch.equal(plain.last, model.last)


class Sparse(Two):
    def factor(self, x):
        return torch.sparse.mm(torch.eye(x.shape[0]).to_sparse(), x)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_sparse_tensors_may_be_saved(policy):
    plain, model = _pair(Sparse, policy)
    assert_trains_alike(plain, model, _loss(torch.randn(3, 8)), steps=4)


class KeepsOutput(Two):
    """Keep the output with its graph, as models do that are asked for it later."""

    def set_up(self):
        self.last = None

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_an_output_that_is_kept_does_not_keep_those_before_it(policy):
    model = KeepsOutput()
    recomputed(model, policy)
    outputs = []
    for _ in range(6):
        outputs.append(weakref.ref(model(torch.randn(3, 8, requires_grad=True))))
    assert sum(output() is not None for output in outputs) <= 2
