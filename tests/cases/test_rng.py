"""Randomness: the same draws in the same order, from every generator."""

import random

import numpy
import torch
from torch import nn

from tests import models
from tests.cases.rewriting import assert_at_work, assert_identical, assert_trains_alike, batch, loss_on, trained, twin


def test_dropout_masks_and_the_stream_behind_them(grain):
    """Turning the memory feature on changed the loss curve (allenai/OLMo-core#828)."""
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.3)
    plain = models.gpt2(n_embd=32, n_layer=3, **dropout)
    model = twin(plain, grain)
    assert_trains_alike(plain, model, loss_on(batch(13)))
    assert_at_work(model)


class Branch(nn.Module):
    """Take one of two ways of the same shape, by the generators of Python and NumPy."""

    def __init__(self, width):
        super().__init__()
        self.ways = nn.ModuleDict({"left": nn.Linear(width, width), "right": nn.Linear(width, width)})

    def forward(self, x):
        way = self.ways["left" if random.random() < 0.5 else "right"]
        return way(x).tanh() * float(numpy.random.rand() + 0.5)


class BranchBlock(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.branch = Branch(width)

    def forward(self, x):
        return x + self.branch(x)


def test_branches_drawn_from_python_and_numpy(grain):
    """Such a branch is not covered by torch's own random state (wenet-e2e/wenet#2482)."""
    plain = nn.Sequential(*(BranchBlock() for _ in range(5)))
    model, x = twin(plain, grain), torch.randn(4, 8)
    for seed in range(4):
        streams, steps = [], []
        for module in (plain, model):
            random.seed(seed)
            numpy.random.seed(seed)
            steps.append(trained(module, lambda m: m(x).square().mean()))
            streams.append((random.random(), numpy.random.rand()))
        assert_identical(*steps)
        assert streams[0] == streams[1]
        assert {grad is None for grad in steps[0].values()} == {True, False}, "some way was not taken"
    assert_at_work(model)
