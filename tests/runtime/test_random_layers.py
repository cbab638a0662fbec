"""Layers made of random functions, which change from call to call: whatever a region has learned, it stays exact."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memopt.errors import NothingToCheckpointError, TraceError
from memopt.runtime.replay import results
from tests import zoo
from tests.runtime.checkpoints import Stack, checkpointed, collected

SIZE = 16
NUM_STEPS = 6


def attention(q, k, v, **options):
    q, k, v = (t.reshape(1, SIZE, 2, SIZE // 2).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).reshape(SIZE, SIZE)


def quietly(function, *args):
    with torch.no_grad():
        return function(*args)


def hooked(function, *args):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        return function(*args)


def caught(x, w):
    try:
        F.linear(x, w).sin()
        raise LookupError
    except LookupError:
        return F.linear(x, w)


FUNCTIONS = {
    "linear": lambda layer, x, y: layer.linear(x),
    "linear with bias": lambda layer, x, y: layer.biased(x),
    "linear of a weight": lambda layer, x, y: F.linear(x, layer.weight),
    "three at once": lambda layer, x, y: sum(layer.qkv(x).chunk(3, -1)),
    "mm": lambda layer, x, y: torch.mm(x, y).tanh(),
    "mm with itself": lambda layer, x, y: torch.mm(x, x).tanh(),
    "mm of chunks": lambda layer, x, y: torch.mm(*torch.cat([x, y]).softmax(-1).chunk(2)),
    "bmm": lambda layer, x, y: torch.bmm(x[None], y[None])[0].tanh(),
    "addmm": lambda layer, x, y: torch.addmm(y, x, layer.weight),
    "einsum": lambda layer, x, y: torch.einsum("ij,kj->ik", x, layer.weight),
    "conv1d": lambda layer, x, y: F.conv1d(x[None], layer.weight[:, :, None])[0],
    "attention": lambda layer, x, y: attention(x, y, x),
    "causal attention": lambda layer, x, y: attention(x, x, y, is_causal=True),
    "attention with dropout": lambda layer, x, y: attention(x, y, y, dropout_p=0.3),
    "checkpointed": lambda layer, x, y: checkpoint(F.linear, x, layer.weight, use_reentrant=False),
    "without grad": lambda layer, x, y: y + quietly(F.linear, x, layer.weight),
    "inside hooks": lambda layer, x, y: hooked(F.linear, x, layer.weight),
    "after an error": lambda layer, x, y: caught(x, layer.weight),
    "norm": lambda layer, x, y: layer.norm(x),
    "batch norm": lambda layer, x, y: layer.batch_norm(x),
    "dropout": lambda layer, x, y: F.dropout(x, 0.3),
    "rrelu": lambda layer, x, y: F.rrelu(x, training=True),
    "sin": lambda layer, x, y: x.double().sin().float(),
    "softmax": lambda layer, x, y: x.softmax(-1),
    "product": lambda layer, x, y: x.tanh() * y,
    "transposed": lambda layer, x, y: x.t(),
    "write": lambda layer, x, y: (x * 1).mul_(y),
    "write to a view": lambda layer, x, y: (x * 1)[:4].add_(1).new_zeros(()) + x,
    "write behind its back": lambda layer, x, y: (x.detach().mul_(0.5), x)[1],
}


class Random(nn.Module):
    """A row of sites, at each one of a few functions; bits of a number say which."""

    def __init__(self, sites):
        super().__init__()
        self.linear, self.biased = nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, SIZE)
        self.qkv, self.norm, self.batch_norm = nn.Linear(SIZE, 3 * SIZE), nn.LayerNorm(SIZE), nn.BatchNorm1d(SIZE)
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) / 4)
        self.sites = sites

    def forward(self, x, choices):
        before, now = x, x * self.weight.mean()
        for number, site in enumerate(self.sites):
            function = FUNCTIONS[site[choices >> number & 1]]
            before, now = now, function(self, now, before)
        return now + before


SITES = st.lists(st.tuples(*[st.sampled_from(sorted(FUNCTIONS))] * 2), min_size=2, max_size=8)


def step(model, x, choices, seed):
    """Return all that one step gives, or the error that it ends with."""
    model.zero_grad()
    torch.manual_seed(seed)
    x = x.detach().requires_grad_()
    loss = model(x, choices).square().sum()
    loss.backward()
    return collected(model) | {"loss": loss.detach(), "input": x.grad, "random": torch.get_rng_state()}


@pytest.mark.parametrize("mode", ["full", "selective", "attention-only"])
@given(sites=SITES, choices=st.lists(st.integers(0, 255), min_size=3, max_size=3), seed=st.integers(0, 2**16))
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_random_layers_are_exact(mode, sites, choices, seed):
    torch.manual_seed(seed)
    plain, x = Stack(Random(sites), Random(sites)), torch.randn(SIZE, SIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "MAX_TAIL_TENSOR_BYTES", 64)  # as if these were large tensors
        try:
            model, _ = checkpointed(plain, mode, x, 0)
        except (NothingToCheckpointError, TraceError):
            return
        for number, taken in enumerate([0, 0, 0, *choices]):
            try:
                want = step(plain, x, taken, number)
            except RuntimeError:  # autograd refuses what was written to
                return
            assert zoo.differing(want, step(model, x, taken, number)) == []
