"""A layer that takes another branch in a later call than in those that taught its region."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memopt.errors import ReplayError
from tests import zoo
from tests.runtime.checkpoints import MODES, Stack, checkpointed, gradients

ROWS, WIDTH = 2048, 256
"""Of a size that nothing of it is kept for being small: 2 MiB."""


def batch_norm(layer, z):
    return layer.norm(z)


def batch_norm_without_counter(layer, z):
    layer.norm.num_batches_tracked = None
    return layer.norm(z)


def batch_norm_as_a_function(layer, z):
    return F.batch_norm(z, layer.norm.running_mean, layer.norm.running_var, training=True)


def rrelu(layer, z):
    """Fill what is saved after it was saved; as many saves as those of the other branch."""
    return F.rrelu(z, training=True)


class Branching(nn.Module):
    def __init__(self, branch):
        super().__init__()
        self.linear, self.norm, self.branch = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), branch

    def forward(self, x, takes_it):
        z = self.linear(x)
        return self.branch(self, z) if takes_it else z * z.exp().detach()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("branch", [batch_norm, batch_norm_without_counter, batch_norm_as_a_function, rrelu])
def test_another_branch_is_exact(branch, mode):
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    plain = Stack(Branching(branch), Branching(branch))
    model, _ = checkpointed(plain, mode, x, False)
    for takes_it in (False, False, True, True, False, True):
        want, got = (gradients(one, x, takes_it) for one in (plain, model))
        assert zoo.differing(want, got) == []


class Overwritten(nn.Module):
    """A result that is written to through pieces with version counters of their own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        one, other = torch.unsafe_chunk(self.linear(x), 2, -1)
        return torch.cat([one.mul_(2), other.exp_()], -1).double().sin().cos().sigmoid().float()


def test_a_result_that_is_overwritten_unseen_is_an_error():
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    plain = Stack(Overwritten(), Overwritten())
    model, _ = checkpointed(plain, "full", x)
    assert zoo.differing(gradients(plain, x), gradients(model, x)) == []
    model, _ = checkpointed(plain, "selective", x)
    with pytest.raises(ReplayError, match="computed other values"):
        gradients(model, x)
