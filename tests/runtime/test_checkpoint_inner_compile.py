"""Functions and modules that are compiled by themselves inside a checkpointed region."""

import copy

import pytest
import torch
from torch import nn

from memopt.errors import GraphCompileError
from tests.cases.rewriting import assert_trains_alike, recomputed


class Block(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.inner = inner

    def forward(self, x):
        return x + self.down(self.inner(self.up(x)))


def _activation(x):
    return nn.functional.silu(x) * 2


def _product(x):
    return x @ torch.eye(8)


def _compiled(function, policy):
    torch._dynamo.reset()
    inner = torch.compile(function, backend="aot_eager")
    plain = nn.Sequential(Block(inner), Block(inner))
    model = copy.deepcopy(plain)
    for block in model:
        recomputed(block, policy)
    return plain, model


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_what_is_cheap_may_be_compiled(policy):
    plain, model = _compiled(_activation, policy)
    x = torch.randn(2, 3, 8)
    assert_trains_alike(plain, model, lambda m: m(x).square().sum())


def test_expensive_functions_may_be_compiled_where_no_result_is_kept():
    plain, model = _compiled(_product, "full")
    x = torch.randn(2, 3, 8)
    assert_trains_alike(plain, model, lambda m: m(x).square().sum())


def test_expensive_functions_may_not_be_compiled_where_results_are_kept():
    """Inside its graph nobody can tell which result is which."""
    _, model = _compiled(_product, "selective")
    with pytest.raises(GraphCompileError, match="Block"):
        model(torch.randn(2, 3, 8))
