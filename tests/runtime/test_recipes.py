"""Outputs of recomputed parts are kept by nobody: who saves one saves a recipe. Exact in every combination."""

import pytest
import torch
from torch import nn

from memopt.errors import ReplayError, SavedTensorModifiedError
from tests import zoo
from tests.runtime.engines import cpu_engine
from tests.runtime.offloads import (
    PARADIGM,
    assert_exact,
    assert_same_step,
    forward_backward,
    offload,
    recompute,
    rewritten,
)
from tests.runtime.steps import assert_equal_gradients, gradients

LIGHT = recompute("layernorm", "moe_act", "mlp_act")


def replays(handle, run):
    """Return (calls, replays) of recomputed parts in what `run` does."""
    before = handle.stats()
    run()
    after = handle.stats()
    return after.checkpointed_calls - before.checkpointed_calls, after.replayed_calls - before.replayed_calls


class Layer(nn.Module):
    """A norm whose output several consumers save, dropout before it."""

    def __init__(self, *, dropout=0.0, width=32):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.input_layernorm = nn.LayerNorm(width)
        self.one, self.other = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        normed = self.input_layernorm(self.dropout(x))
        return x + self.one(normed) * self.other(normed)


class Model(nn.Module):
    def __init__(self, make=Layer, num_layers=3, **options):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(make(**options) for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def hidden(seed=0):
    return torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("config", [LIGHT, PARADIGM, LIGHT | offload("attn_norm", "mlp_norm")], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_each_part_is_replayed_once_a_backward(name, config):
    plain, inputs = zoo.ZOO[name](), zoo.batch(name)
    model, handle = rewritten(plain, config, inputs)
    calls, again = replays(handle, lambda: zoo.train_step(model, inputs))
    assert 0 < calls == again


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_two_consumers_share_an_output_behind_dropout(dropout):
    plain = Model(dropout=dropout)
    model, handle = rewritten(plain, recompute("layernorm"), hidden())
    for seed in range(3):
        for one in (plain, model):
            torch.manual_seed(seed)
            one.zero_grad()
            one(hidden(seed)).sum().backward()
        assert_equal_gradients(gradients(plain), gradients(model))
    assert handle.stats().checkpointed_calls == handle.stats().replayed_calls == 9


def test_an_input_that_is_swapped_comes_back_for_the_replay():
    plain = Model()
    with cpu_engine(poison=True):
        model, handle = rewritten(plain, recompute("layernorm") | offload("attn_norm"), hidden())
        for seed in range(3):
            assert_same_step(plain, model, hidden(seed))
        assert handle.stats().copied_out_tensors == handle.stats().copied_in_tensors == 9


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("config", [LIGHT, PARADIGM], ids=["light", "paradigm"])
def test_under_autocast_casts_of_an_output_are_recipes_too(name, config):
    plain, inputs = zoo.ZOO[name](), zoo.batch(name)
    model, handle = rewritten(plain, config, inputs)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert_exact(plain, model, inputs, steps=1)
    assert handle.stats().replayed_calls > 0


def test_a_graph_that_is_retained_is_replayed_in_each_backward():
    plain, x = Model(), hidden()
    model, handle = rewritten(plain, recompute("layernorm"), x)
    for one in (plain, model):
        loss = one(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_equal_gradients(gradients(plain), gradients(model))
    assert handle.stats().replayed_calls == 2 * handle.stats().checkpointed_calls


def test_gradients_of_gradients():
    plain, x = Model(), hidden()
    model, _ = rewritten(plain, recompute("layernorm"), x)
    for one in (plain, model):
        given = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(one(given).square().sum(), given, create_graph=True)
        grad.square().sum().backward()
    assert_equal_gradients(gradients(plain), gradients(model))


class WritesLater(Layer):
    """Consumers save the output, then it is written to."""

    def forward(self, x):
        normed = self.input_layernorm(x)
        out = self.one(normed)
        normed.mul_(2)
        return out


def test_an_output_that_is_written_to_after_it_was_saved_is_an_error():
    plain, x = Model(WritesLater), hidden()
    model, _ = rewritten(plain, recompute("layernorm"), x)
    for _ in range(2):
        with pytest.raises(SavedTensorModifiedError):
            model(x).sum().backward()


class WritesFirst(Layer):
    """The output is written to before a consumer saves it: what is saved is not what the norm gave."""

    def forward(self, x):
        normed = self.input_layernorm(x)
        normed.mul_(2)
        return self.one(normed)


def test_an_output_that_is_written_to_before_it_is_saved_is_no_recipe():
    plain, x = Model(WritesFirst), hidden()
    model, _ = rewritten(plain, recompute("layernorm"), x)
    for seed in range(3):
        assert_same_step(plain, model, hidden(seed))


class Transient(Layer):
    """The norm's output dies within the forward, so that another tensor may get its place."""

    def forward(self, x):
        total = self.input_layernorm(x).sum()
        others = [torch.full_like(x, number).mul(x) for number in range(4)]
        return total + sum(self.one(other) for other in others)


def test_a_storage_in_the_place_of_a_dead_output_is_no_recipe():
    plain, x = Model(Transient), hidden()
    model, _ = rewritten(plain, recompute("layernorm"), x)
    for seed in range(3):
        assert_same_step(plain, model, hidden(seed))


def test_forwards_before_backwards():
    plain = Model()
    model, _ = rewritten(plain, recompute("layernorm") | offload("attn_norm"), hidden())
    for one in (plain, model):
        losses = [one(hidden(seed)).sum() for seed in range(3)]
        for number in (1, 0, 2):
            losses[number].backward()
    assert_equal_gradients(gradients(plain), gradients(model))


def test_what_learns_and_what_does_not_train_are_no_matter():
    plain = Model()
    model, handle = rewritten(plain, recompute("layernorm"), hidden())
    with torch.no_grad():
        model(hidden())
    model.eval()
    assert torch.equal(plain(hidden()), model(hidden()))
    model.train()
    assert handle.stats().checkpointed_calls == 0
    forward_backward(model, hidden())
    assert handle.stats().checkpointed_calls == 3


class Odd(Layer):
    """A norm that gives out what is easily taken for something else; each gets the layer's own `use` of it."""

    def __init__(self, give, use):
        super().__init__()
        self.input_layernorm = Giving(give)
        self.use = use

    def forward(self, x):
        return self.use(self, self.input_layernorm(x))


class Giving(nn.Module):
    def __init__(self, give):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32))
        self.register_buffer("table", torch.randn(32, 32))
        self.give = give

    def forward(self, x):
        return self.give(self, torch.tanh(x * self.weight))


def squares_of_casts(layer, pair):
    casts = [half.to(torch.bfloat16) for half in pair]
    return layer.one(torch.cat([cast * cast for cast in casts], -1).float())


def transposed_cast(layer, y):
    cast = y.to(torch.bfloat16, memory_format=torch.channels_last)
    return layer.one((cast * cast).float().squeeze(0))


ODD = {
    "two outputs of one node": (lambda norm, y: y.chunk(2, -1), squares_of_casts),
    "a cast into other strides": (lambda norm, y: y.unsqueeze(0), transposed_cast),
    "the same bits as integers": (
        lambda norm, y: y,
        lambda layer, y: layer.one(y.detach().view(torch.int32).remainder(7).float() * y),
    ),
    "a conjugate": (
        lambda norm, y: torch.complex(y, y * 2),
        lambda layer, y: layer.one((y.conj() * y * torch.complex(y.real, y.imag)).real),
    ),
    "a slice of a wider tensor": (
        lambda norm, y: (y.repeat(1, 1, 2) * 2)[..., 8:40],
        lambda layer, y: layer.one(y * y),
    ),
    "a reversed view": (lambda norm, y: y.flip(-1).transpose(0, 1), lambda layer, y: layer.one(y * y).transpose(0, 1)),
    "its weight": (lambda norm, y: (y, norm.weight), lambda layer, pair: layer.one(pair[0] * pair[1]) * pair[1]),
    "its buffer": (lambda norm, y: (y, norm.table), lambda layer, pair: layer.one(pair[0] @ pair[1])),
    "its input": (lambda norm, y: y.view_as(y), lambda layer, y: layer.one(y * y)),
    "a dict": (
        lambda norm, y: {"a": y, "b": [y * 2, y * 3]},
        lambda layer, d: layer.one(d["a"] * d["b"][1]) * d["b"][0],
    ),
    "an expanded scalar": (lambda norm, y: y.mean().expand(4, 16, 32), lambda layer, y: layer.one(y * y)),
}


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("name", ODD)
def test_odd_outputs(name, autocast):
    plain = Model(Odd, give=ODD[name][0], use=ODD[name][1])
    model, _ = rewritten(plain, recompute("layernorm") | offload("attn_norm"), hidden())
    for seed in range(4):
        for one in (plain, model):
            one.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = one(hidden(seed)).float().square().sum()
            loss.backward()
        assert_equal_gradients(gradients(plain), gradients(model))


def clamped(target, how):
    """Write to a tensor where autograd does not see it: with or without counting that as a write."""
    if how == "counted":
        with torch.no_grad():
            target.clamp_(-0.1, 0.1)
    else:
        target.data.clamp_(-0.1, 0.1)
    return target


WRITES = {
    "the output, counted": lambda layer, y: layer.one(clamped(y, "counted")),
    "its cast, counted": lambda layer, y: layer.one(clamped(y.to(torch.bfloat16), "counted").float()),
    "a cast of the written output": lambda layer, y: layer.one(clamped(y, "counted").to(torch.bfloat16).float()),
}


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_without_a_gradient_is_saved_as_it_is_then(name, autocast):
    plain = Model(Odd, give=lambda norm, y: y * 1, use=WRITES[name])  # tanh itself saves what it gives out
    model, _ = rewritten(plain, recompute("layernorm"), hidden())
    for seed in range(4):
        for one in (plain, model):
            one.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = one(hidden(seed)).float().square().sum()
            loss.backward()
        assert_equal_gradients(gradients(plain), gradients(model))


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_a_write_that_no_version_shows_is_an_error_in_the_first_step(autocast):
    plain = Model(Odd, give=lambda norm, y: y, use=lambda layer, y: layer.one(clamped(y, "not counted")))
    model, _ = rewritten(plain, recompute("layernorm"), hidden())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(hidden()).float().square().sum()
    with pytest.raises(ReplayError, match="other values"):
        loss.backward()


class WritesToSaved(torch.autograd.Function):
    """A backward that works in the memory of what it has saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x.mul_(0)
        return grad * 2


@pytest.mark.parametrize("config", [{}, recompute("layernorm"), offload("module:layers.*")], ids=str)
def test_a_backward_that_writes_to_an_output_that_others_saved_is_an_error(config):
    plain = Model(Odd, give=lambda norm, y: y, use=lambda layer, y: layer.one(y) + WritesToSaved.apply(y))
    model = rewritten(plain, config, hidden())[0] if config else plain
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(hidden()).sum().backward()


def test_memory_into_which_another_batch_was_written_is_saved_anew():
    plain, x = Model(), hidden().requires_grad_()
    model, _ = rewritten(plain, recompute("layernorm") | offload("attn_norm"), hidden())
    unused = []
    for seed in range(4):
        x.data.copy_(hidden(seed))
        unused.append(model(x))
        assert_same_step(plain, model, x)
        x.grad = None


def test_an_input_that_is_written_to_after_the_norm_is_an_error_that_names_its_shape():
    class Residual(Layer):
        def forward(self, x):
            x = x * 1
            x += self.one(self.input_layernorm(x))
            return x

    model, _ = rewritten(Model(Residual), recompute("layernorm"), hidden())
    with pytest.raises(SavedTensorModifiedError, match=r"shape \[4, 16, 32\], an argument of"):
        model(hidden()).sum().backward()
