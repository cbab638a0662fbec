"""One storage seen in several ways, or owned by someone else."""

import torch
from torch import nn

from tests.cases.rewriting import assert_at_work, assert_trains_alike, twin


class TimesItsTranspose(torch.autograd.Function):
    """Keep a square and its transpose: one address, one dtype, other strides."""

    left: list = []

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x.mT)
        TimesItsTranspose.left.append(x.untyped_storage()._weak_ref())
        return x * x.mT

    @staticmethod
    def backward(ctx, grad):
        x, transposed = ctx.saved_tensors
        assert x.stride() == transposed.stride()[::-1] == (x.shape[1], 1)
        assert x.untyped_storage()._cdata == transposed.untyped_storage()._cdata
        return grad * transposed + (grad * x).mT


class Squaring(nn.Module):
    def forward(self, x):
        return TimesItsTranspose.apply(x * 2) + (x @ x.mT) / 8


class SquareBlock(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.lift, self.square = nn.Linear(width, width), Squaring()

    def forward(self, x):
        return self.square(self.lift(x))


def test_a_tensor_and_its_transpose_are_two_tensors(grain):
    """Both shared one host copy, and gradients were silently wrong (modelscope/ms-swift#10157)."""
    plain = nn.Sequential(SquareBlock(), SquareBlock())
    model, x = twin(plain, grain), torch.randn(8, 8)
    assert_trains_alike(plain, model, lambda m: m(x).square().mean())
    TimesItsTranspose.left.clear()
    loss = model(x).square().mean()
    assert len(TimesItsTranspose.left) == 2
    assert all(torch.UntypedStorage._expired(left) for left in TimesItsTranspose.left)
    loss.backward()
    assert_at_work(model)


class Rotated(nn.Module):
    """Turn pairs of features by tables that are not its own."""

    def __init__(self, width):
        super().__init__()
        self.lift = nn.Linear(width, width)

    def forward(self, x, tables):
        cos, sin = tables
        y = self.lift(x)
        return y * cos + y.roll(1, -1) * sin


class RotatedBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = Rotated(width)

    def forward(self, x, *, tables):
        return x + self.attention(x, tables)


class Rotary(nn.Module):
    """Four blocks that all get the caller's tables."""

    def __init__(self, width=8):
        super().__init__()
        self.blocks = nn.ModuleList(RotatedBlock(width) for _ in range(4))

    def forward(self, x, tables):
        for block in self.blocks:
            x = block(x, tables=tables)
        return x


def test_rotary_tables_stay_with_their_owner(grain):
    """A layer that was done freed cos and sin, which the next one needed (mindspore-ai/hyper-parallel#664)."""
    plain = Rotary()
    model, x = twin(plain, grain), torch.randn(2, 5, 8)
    angles = torch.arange(5.0)[:, None] * torch.linspace(1, 0.1, 8)
    tables, originals = (angles.cos(), angles.sin()), (angles.cos(), angles.sin())

    def loss_of(module):
        loss = module(x, tables).square().mean()
        assert all(torch.equal(a, b) for a, b in zip(tables, originals, strict=True))
        return loss

    assert_trains_alike(plain, model, loss_of)
    assert all(torch.equal(a, b) for a, b in zip(tables, originals, strict=True))
    assert_at_work(model)
