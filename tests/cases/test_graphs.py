"""Graphs that are used twice, in part, or never, and forwards that do not end."""

import gc
import weakref

import pytest
import torch
from torch import nn

import memopt
from memopt.ir import saved_bytes
from tests.cases.rewriting import assert_at_work, assert_trains_alike, stats_of, swaps, trained, twin
from tests.runtime.engines import assert_empty


class FusedLoss(torch.autograd.Function):
    """Head and cross entropy in one; work the gradients out in forward, and scale them in place in backward."""

    @staticmethod
    def forward(ctx, hidden, weight, labels):
        logs = (hidden @ weight.t()).log_softmax(-1)
        rows = torch.arange(len(labels))
        slope = logs.exp()
        slope[rows, labels] -= 1
        slope /= len(labels)
        ctx.save_for_backward(slope @ weight, slope.t() @ hidden)
        return -logs[rows, labels].mean()

    @staticmethod
    def backward(ctx, grad):
        for_hidden, for_weight = ctx.saved_tensors
        return for_hidden.mul_(grad), for_weight.mul_(grad), None


class LossHead(nn.Module):
    def __init__(self, width, num_labels):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_labels, width) / width)

    def forward(self, hidden, labels):
        return FusedLoss.apply(hidden, self.weight, labels)


def test_gradients_that_forward_computed_and_backward_scales_in_place(grain):
    """Fused loss kernels keep gradients, not activations (linkedin/Liger-Kernel#533)."""
    plain = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.SiLU()), LossHead(8, 50)])
    model = twin(plain, grain)
    x, labels = torch.randn(6, 8), torch.randint(0, 50, (6,))
    assert_trains_alike(plain, model, lambda m: m[1](m[0](x), labels) * 3)
    assert_at_work(model)


def penalized(model, x):
    """Return the gradients of a score and of how far the slope at its inputs is from one."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    score = model(x).pow(3).sum()
    (slope,) = torch.autograd.grad(score, x, create_graph=True)
    (score + (slope.norm(dim=-1) - 1).square().mean()).backward()
    return {"slope": slope.detach(), "x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


def test_second_derivatives_of_a_gradient_penalty(grain):
    """Asking for create_graph=True through a checkpointed region was an error (pytorch/pytorch#102223)."""
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Softplus(), nn.LayerNorm(8)) for _ in range(3)))
    model, x = twin(plain, grain), torch.randn(5, 8)
    for _ in range(3):
        want, got = penalized(plain, x), penalized(model, x)
        # The last norm's bias does not reach the slope, but it does reach the score.
        assert all(grad is not None for grad in want.values())
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert_at_work(model)


class Sidetracked(nn.Module):
    """A trunk, and a side whose output may be cut from the graph after it is computed."""

    def __init__(self, width=8):
        super().__init__()
        self.trunk = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(3)
        )
        self.side = nn.Sequential(nn.Sequential(nn.Linear(width, width), nn.Tanh()))

    def forward(self, x, cut):
        for block in self.trunk:
            x = x + block(x)
        side = self.side(x)
        return x.square().mean() + (side.detach() if cut else side).mean()


def test_forwards_without_a_backward_leave_nothing(grain, engine):
    """A tracker that waits for every unpack stops the next step (huggingface/trl#5737, meta-pytorch/torchtune#2709)."""
    plain = Sidetracked()
    model, x = twin(plain, grain), torch.randn(4, 8)
    for cut in (True, False, True):
        model(torch.randn(7, 8), cut)
        assert_trains_alike(plain, model, lambda m, cut=cut: m(x, cut), steps=1)
    assert_at_work(model)
    input_ = torch.randn(4, 8)
    alive, loss = weakref.ref(input_), model(input_, False)
    assert (engine.pool.in_use_bytes > 0) == swaps(grain)
    del input_, loss
    gc.collect()
    assert alive() is None
    assert_empty(engine)


class Failing(nn.Module):
    """A block that runs out of memory, or so it says, where the batch is big."""

    def __init__(self, limit, width=8):
        super().__init__()
        self.limit = limit
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        y = self.up(x).relu()
        if len(x) > self.limit:
            raise torch.OutOfMemoryError("no room")
        return x + self.down(y)


def test_a_forward_that_fails_and_a_smaller_batch_after_it(grain, engine):
    """After an error that the loop caught, the next batch failed too (pytorch/pytorch#18853)."""
    plain = nn.Sequential(Failing(1 << 10), Failing(1 << 10), Failing(6))
    model, big, small = twin(plain, grain), torch.randn(9, 8), torch.randn(4, 8)
    for _ in range(2):
        for module in (plain, model):
            with pytest.raises(torch.OutOfMemoryError, match="no room"):
                module(big)
        outside = torch.randn(3, requires_grad=True).exp()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert torch.equal(outside.grad_fn._saved_result, outside)
        assert_empty(engine)
        assert_trains_alike(plain, model, lambda m: m(small).square().mean())
    assert_at_work(model)


class Repeated(nn.Module):
    """One layer, used again and again."""

    def __init__(self, num_times, width=32):
        super().__init__()
        self.num_times = num_times
        self.cell = nn.Linear(width, width)

    def forward(self, x):
        for _ in range(self.num_times):
            x = self.cell(x)
        return x


@pytest.mark.parametrize("num_times", [1, 100])
def test_every_use_of_a_recurrent_module_counts(grain, num_times):
    """A summary counted a module once that ran a hundred times (TylerYep/torchinfo#144)."""
    plain, x = Repeated(num_times), torch.randn(16, 32)
    activation_bytes = num_times * 16 * 32 * 4  # the input of every use
    assert saved_bytes(memopt.analyze(plain, x).saved).activation_bytes == activation_bytes
    model = twin(plain, grain)
    assert_trains_alike(plain, model, lambda m: m(x).sum(), steps=1)
    assert_at_work(model)
    trained(model, lambda m: m(x).sum())
    stats = stats_of(model)
    if swaps(grain):
        assert stats.copied_out_bytes == 2 * activation_bytes
    else:
        assert stats.checkpointed_calls == stats.replayed_calls == 2 * num_times
