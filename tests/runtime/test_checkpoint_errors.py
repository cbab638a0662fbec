"""What a checkpointed region cannot do exactly, it refuses in one line."""

import itertools

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import (
    IncompatibleError,
    MemoptError,
    NoLayerContainerError,
    NothingToCheckpointError,
    PlanMismatchError,
    ReplayError,
    RewriteError,
    SavedTensorModifiedError,
)
from memopt.passes import ActivationCheckpoint, AttentionSwap
from tests import zoo
from tests.runtime.checkpoints import MODES, Stack, checkpointed, gradients, plan_of, stacked


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


class Mlp(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("scale", torch.ones(2 * width))

    def forward(self, x):
        return self.down(self.up(x.sin()).sin() * self.scale) + x


ROWS = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def stack(mode, *layers):
    torch.manual_seed(0)
    return stacked(mode, ROWS, *(layers or (Mlp(), Mlp())))


@torch.no_grad()
def write(tensor):
    tensor.mul_(2)


CHANGED = {
    "layers.1.up.weight": (r"\[16, 8\], a parameter of 'layers.1'", True),
    "layers.1.up.bias": (r"\[16\], a parameter of 'layers.1'", False),  # eager saves no bias
    "layers.1.scale": (r"\[16\], a buffer of 'layers.1'", True),
}


@pytest.mark.parametrize("name", CHANGED)
def test_writing_to_what_a_region_carries_before_backward(name, mode):
    """Of a bias too, though autograd does not save it: the replay reads it."""
    message, raises_in_eager = CHANGED[name]
    plain, model, _ = stack(mode)
    for _ in range(2):
        for one in (plain, model):
            loss = one(ROWS).sum()
            write(one.state_dict(keep_vars=True)[name])
            write(one.state_dict(keep_vars=True)[name])
            if one is model or raises_in_eager:
                error = SavedTensorModifiedError if one is model else RuntimeError
                with pytest.raises(error, match="modified by an inplace operation") as caught:
                    loss.backward()
        version = one.state_dict(keep_vars=True)[name]._version
        assert caught.match(f"a tensor of shape {message}, is at version {version}; expected version {version - 2}")
        assert "\n" not in str(caught.value)
    del caught
    assert zoo.differing(gradients(plain, ROWS), gradients(model, ROWS)) == []


def test_an_optimizer_step_before_backward(mode):
    """The usual mistake of two losses on one graph."""
    _, model, _ = stack(mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = model(ROWS).sum(), model(ROWS).square().sum()
    first.backward()
    optimizer.step()
    with pytest.raises(SavedTensorModifiedError, match="a parameter of 'layers.1'"):
        second.backward()


def test_writing_to_an_argument_after_the_region(mode):
    plain, model, _ = stack(mode)
    for one, error in ((plain, RuntimeError), (model, SavedTensorModifiedError)):
        for _ in range(2):
            x = ROWS.clone().requires_grad_()
            y = x * 1
            loss = one.layers[0](y).sum()
            write(y)
            with pytest.raises(error, match="modified by an inplace operation") as caught:
                loss.backward()
    assert caught.match(r"a tensor of shape \[4, 8\], an argument of 'layers.0'")


class Counting(Mlp):
    """Do something else in every call, by what memopt cannot know of."""

    ways = itertools.count()

    def forward(self, x):
        return self.does(next(Counting.ways), super().forward(x))


def other_shape(n, y):
    return y.exp()[: 1 + n % 3].sin().sum()


def other_dtype(n, y):
    return y.to(torch.float64 if n % 2 else torch.float32).exp().sin().sum().float()


def fewer(n, y):
    return (y if n % 2 else y.exp().sin().cos()).sum()


def other_function(n, y):
    w = torch.ones(8, 8)
    return (y @ w if n % 2 else torch.bmm(y[None], w[None])[0]).sin().exp().sum()


DIFFERENT = {
    other_shape: "saved a float32 tensor of shape .* where the forward saved a float32 tensor of shape",
    other_dtype: "saved a float64 tensor of shape .* where the forward saved a float32 tensor of shape",
    fewer: "saved less than the forward did",
}


@pytest.mark.parametrize("does", DIFFERENT)
def test_a_forward_that_does_something_else_in_its_replay(does):
    Counting.does = staticmethod(does)
    Counting.ways = itertools.count()
    _, model, _ = stack("full", Counting())
    Counting.ways = itertools.count()
    loss = model(ROWS)
    with pytest.raises(ReplayError, match=f"the replay of 'layers.0' {DIFFERENT[does]}") as caught:
        loss.backward()
    assert "take the module out of the plan" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_function_where_a_result_was_kept():
    Counting.does = staticmethod(other_function)
    Counting.ways = itertools.count()
    _, model, _ = stack("selective", Counting())
    Counting.ways = itertools.count()
    big = torch.randn(1 << 16, 8)
    loss = model(big)
    with pytest.raises(ReplayError, match="called 'matmul' where the forward did not"):
        loss.backward()


def test_the_next_step_after_an_error_is_exact(mode):
    plain, model, _ = stack(mode)
    for error in (ZeroDivisionError, KeyboardInterrupt):
        hook = model.layers[1].down.register_forward_pre_hook(_raising(error))
        with pytest.raises(error):
            model(ROWS)
        hook.remove()
        assert zoo.differing(gradients(plain, ROWS), gradients(model, ROWS)) == []


def _raising(error):
    def fail(*args):
        raise error

    return fail


def test_an_error_in_the_replay_leaves_the_modules_as_they_were(mode):
    class Failing(Mlp):
        fails = False

        def forward(self, x):
            if Failing.fails:
                raise ZeroDivisionError
            return super().forward(x)

    plain, model, _ = stack(mode, Failing(), Failing())
    for _ in range(2):
        loss = model(ROWS).sum()
        Failing.fails = True
        random = torch.get_rng_state()
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        assert torch.equal(random, torch.get_rng_state())
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert torch._C._len_torch_function_stack() == 0
        Failing.fails = False
        assert zoo.differing(gradients(plain, ROWS), gradients(model, ROWS)) == []


def native():
    model = zoo.ZOO["llama"]()
    model.gradient_checkpointing_enable()
    return model


def graph_of(name="llama"):
    return memopt.analyze(zoo.ZOO[name](), zoo.batch(name, use_cache=False))


def long():
    """Return a batch whose attention saves enough to be swapped."""
    return {"input_ids": torch.zeros(4, 4096, dtype=torch.long), "use_cache": False}


def frozen():
    return Stack(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)


def plan_twice():
    model, handle = checkpointed(zoo.ZOO["llama"](), "full", **zoo.batch("llama"))
    memopt.apply(model, handle.plan)  # the same again is nothing
    memopt.apply(model, plan_of(graph_of(), "selective"))


SWAP_TOO = {"activation_checkpoint": "full", "activation_swap": "attention"}


def train_frozen_lazily():
    model = frozen()
    memopt.apply(model, {"activation_checkpoint": "selective"})
    model(torch.randn(2, 4))


REFUSED = {
    "nothing trained in the first forward": (
        NothingToCheckpointError,
        r"set activation_checkpoint to off: .* until handle.undo\(\) or memopt.undo\(model\)$",
        train_frozen_lazily,
    ),
    "both in a plan": (IncompatibleError, "incompatible with", lambda: memopt.plan(graph_of(), **SWAP_TOO)),
    "both in a configuration": (
        IncompatibleError, "activation_swap='attention' is incompatible", lambda: memopt.apply(Stack(), SWAP_TOO),
    ),
    "both as passes": (
        IncompatibleError,
        "activation_swap='attention' is incompatible with activation checkpointing",
        lambda: memopt.plan(memopt.analyze(zoo.ZOO["llama"](), long()), passes=[AttentionSwap(), ActivationCheckpoint()]),
    ),
    "both as passes, in the other order": (
        IncompatibleError,
        "activation_swap='attention' is incompatible with activation checkpointing; drop one of the two",
        lambda: memopt.plan(graph_of(), passes=[ActivationCheckpoint(), AttentionSwap()]),
    ),
    "one pass with two modes": (
        IncompatibleError, "decided otherwise on 'model.layers.0'; give it once",
        lambda: memopt.plan(graph_of(), passes=[ActivationCheckpoint(mode=mode) for mode in ("selective", "full")]),
    ),
    "transformers' own": (
        IncompatibleError, "call model.gradient_checkpointing_disable",
        lambda: memopt.apply(native(), plan_of(graph_of(), "full")),
    ),
    "transformers' own, untraced": (
        IncompatibleError, "gradient_checkpointing_disable",
        lambda: memopt.apply(native(), {"activation_checkpoint": "full"}),
    ),
    "no layers": (
        NoLayerContainerError,
        "found no layers in Linear",
        lambda: memopt.apply(nn.Linear(4, 4), {"activation_checkpoint": "full"}, torch.randn(2, 4)),
    ),
    "nothing trained": (
        NothingToCheckpointError,
        "2 of its 2 layers save nothing",
        lambda: memopt.apply(frozen(), {"activation_checkpoint": "selective"}, torch.randn(2, 4)),
    ),
    "another model": (
        PlanMismatchError,
        "the plan was made for another model",
        lambda: memopt.apply(zoo.ZOO["gpt2"](), plan_of(graph_of(), "full")),
    ),
    "another depth": (
        PlanMismatchError,
        "it knows nothing of 'model.layers.2'",
        lambda: memopt.apply(zoo.ZOO["llama"](num_hidden_layers=3), plan_of(graph_of(), "full")),
    ),
    "another plan": (RewriteError, "rewritten by another plan already", plan_twice),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    error, message, wrong = REFUSED[case]
    with pytest.raises(error, match=message) as caught:
        wrong()
    assert isinstance(caught.value, MemoptError)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)
