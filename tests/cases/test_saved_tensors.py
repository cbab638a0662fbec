"""Saved tensors that are late, odd, overwritten, or carry more than their values."""

import pytest
import torch
from torch import nn

from memopt.errors import SavedTensorModifiedError
from tests.cases.rewriting import (
    assert_at_work,
    assert_identical,
    assert_trains_alike,
    rewritten,
    stats_of,
    swaps,
    trained,
    twin,
)


def test_noise_that_is_saved_before_it_is_drawn(grain):
    """RReLU hands its empty noise to autograd and fills it afterwards (pytorch/pytorch#193671)."""

    def block():
        return nn.Sequential(nn.Linear(16, 16), nn.RReLU(0.1, 0.9))

    plain = nn.Sequential(block(), block(), nn.Linear(16, 1))
    model, x = twin(plain, grain), torch.randn(32, 16)
    assert_trains_alike(plain, model, lambda m: m(x).square().mean())
    assert_at_work(model)


class Gathered(torch.autograd.Function):
    """Save an index, a mask, complex factors and a scalar; note as what they come back."""

    notes: list = []

    @staticmethod
    def forward(ctx, x, index, mask, turn, scale):
        ctx.save_for_backward(index, mask, turn, scale)
        return torch.where(mask, x[:, index], 0) * turn.real * scale

    @staticmethod
    def backward(ctx, grad):
        index, mask, turn, scale = ctx.saved_tensors
        Gathered.notes.append([(t.dtype, t.device, t.shape, t.stride(), t.requires_grad) for t in ctx.saved_tensors])
        into = torch.zeros_like(grad)
        return into.index_add(1, index, torch.where(mask, grad, 0) * turn.real * scale), None, None, None, None


class Gather(nn.Module):
    def forward(self, x):
        index = torch.arange(x.shape[1]).flip(0)
        turn = torch.polar(torch.ones_like(x), x.detach())
        return Gathered.apply(x, index, x > 0, turn, torch.tensor(1.5))


class GatherBlock(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.lift, self.gather = nn.Linear(width, width), Gather()

    def forward(self, x):
        return self.gather(self.lift(x))


def test_integers_masks_complex_numbers_and_scalars_come_back_as_what_they_were(grain):
    """What had been on the CPU all along came back on the GPU (meta-pytorch/torchtune#2456)."""
    plain = nn.Sequential(GatherBlock(), GatherBlock())
    model, x = twin(plain, grain), torch.randn(3, 5)
    Gathered.notes.clear()
    assert_trains_alike(plain, model, lambda m: m(x).square().sum())
    notes = [Gathered.notes[i : i + 2] for i in range(0, len(Gathered.notes), 2)]
    assert len(notes) == 6
    assert all(note == notes[0] for note in notes)
    assert {dtype for dtype, *_ in notes[0][0]} == {torch.int64, torch.bool, torch.complex64, torch.float32}
    assert_at_work(model)
    if swaps(grain):
        assert stats_of(model).copied_out_tensors >= 3 * 2 * 4  # those four, in each step and block


class Clobbering(nn.Module):
    """Overwrite, if told to, what each block has returned and kept."""

    def __init__(self, width=6):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Sigmoid()) for _ in range(3))

    def forward(self, x, clobber):
        for block in self.blocks:
            y = block(x)
            x = y.mul_(2) if clobber else y * 2
        return x.square().sum()


def test_overwriting_what_was_saved_is_still_an_error(grain):
    """Under hooks that hold a copy nobody noticed the write, and gradients were wrong (pytorch/pytorch#62717)."""
    plain = Clobbering()
    model, x = twin(plain, grain), torch.randn(4, 6)
    assert_trains_alike(plain, model, lambda m: m(x, False))
    with pytest.raises(RuntimeError, match="inplace"):
        plain(x, True).backward()
    if swaps(grain):
        with pytest.raises(SavedTensorModifiedError, match="inplace"):
            model(x, True).backward()
    else:  # computed again, it is what it was
        assert_identical(trained(plain, lambda m: m(x, False)), trained(model, lambda m: m(x, True)))
    assert_trains_alike(plain, model, lambda m: m(x, False), steps=1)
    assert_at_work(model)


class AccumulatingLinear(torch.autograd.Function):
    """Add the weight's gradient to a buffer that hangs on the weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        weight.main_grad += grad.t() @ x
        return grad @ weight, None


class Fused(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.weight.main_grad = torch.zeros_like(self.weight)

    def forward(self, x):
        return AccumulatingLinear.apply(x, self.weight).tanh()


def fused_and_plain_layers():
    torch.manual_seed(0)
    return nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()), Fused(), nn.Sequential(nn.Linear(8, 8))])


def run_in_order(layers, x):
    for layer in layers:
        x = layer(x)
    return x.square().sum()


def test_what_hangs_on_a_saved_weight_is_lost_loudly(grain):
    """Autograd returns a bare tensor for a weight that went through hooks (pytorch/pytorch#126676): never silent."""
    model = rewritten(fused_and_plain_layers(), grain)
    x = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(AttributeError, match="main_grad"):
        run_in_order(model, x).backward()
    assert not model[1].weight.main_grad.any()
    assert_at_work(model)


def test_a_layer_that_reads_them_can_be_left_out(grain):
    """The way out of the case before (pytorch/pytorch#126676): the layers around it are rewritten, it is not."""
    plain, model = fused_and_plain_layers(), fused_and_plain_layers()
    for layer in (model[0], model[2]):
        rewritten(layer, grain)
    x = torch.randn(4, 8, requires_grad=True)
    assert_trains_alike(plain, model, lambda m: run_in_order(m, x))
    assert model[1].weight.main_grad.any()
    assert torch.equal(plain[1].weight.main_grad, model[1].weight.main_grad)
    assert_at_work(model)
