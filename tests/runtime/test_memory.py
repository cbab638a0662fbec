"""What is copied, what comes back, and what is left: nothing."""

import gc
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import SavedTensorModifiedError
from memopt.runtime import swap_wrapper
from tests import models
from tests.runtime.engines import assert_empty, counters_of, cpu_engine, everything
from tests.runtime.steps import SWAP, assert_equal_steps, step


class Saving(torch.autograd.Function):
    """Save whatever is given and hand it back in backward."""

    seen: list = []

    @staticmethod
    def forward(ctx, x, *saved):
        ctx.save_for_backward(*saved)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        Saving.seen = list(ctx.saved_tensors)
        return grad, *([None] * len(ctx.saved_tensors))


class Region(nn.Module):
    """A module whose forward saves what `make` returns."""

    def __init__(self, make):
        super().__init__()
        self.make = make
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.register_buffer("table", torch.randn(64, 64))

    def forward(self, x):
        return Saving.apply(x, *self.make(self, x))


def run(make, policy=everything):
    """Return (what came back, what went in, counters) of one forward and backward of a wrapped region."""
    region = swap_wrapper(Region(make), policy)
    x = torch.randn(64, 64, requires_grad=True)
    expected = [t.detach().clone() for t in make(region, x)]
    region(x).sum().backward()
    return Saving.seen, expected, counters_of(region)


def test_views_come_back_exact_and_their_storage_is_copied_once():
    def views(region, x):
        return x, x.t(), x[:, :1], x[3:9, 1::2], x.view(16, 256), x.unsqueeze(0).expand(3, 64, 64), x.diagonal()

    with cpu_engine(poison=True):
        back, expected, counters = run(views)
        assert counters.copied_out_tensors == 1
        assert counters.copied_out_bytes == counters.registered_bytes == 64 * 64 * 4
        x = torch.randn(64, 64)
        for got, want, like in zip(back, expected, views(None, x), strict=True):
            assert torch.equal(got, want)
            assert (type(got), got.dtype, got.device) == (torch.Tensor, want.dtype, want.device)
            assert (got.shape, got.stride(), got.storage_offset()) == (like.shape, like.stride(), like.storage_offset())
        del back
        Saving.seen = []


def test_a_broadcast_costs_its_storage_not_its_size():
    with cpu_engine():
        back, expected, counters = run(lambda region, x: (torch.arange(64.0).mul(2).expand(4096, 64),))
        assert counters.copied_out_bytes == 64 * 4
        assert torch.equal(back[0], expected[0])
        assert back[0].stride() == (0, 1)
        del back
        Saving.seen = []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8])
def test_every_dtype_and_the_scalar(dtype):
    with cpu_engine():
        back, expected, counters = run(lambda region, x: (x.detach().to(dtype), torch.tensor(3).to(dtype)))
        assert all(torch.equal(a, b) and a.dtype is dtype for a, b in zip(back, expected, strict=True))
        assert counters.copied_out_tensors == 2
        del back
        Saving.seen = []


class Bytes(nn.Module):
    """Saves bytes from the middle of a storage, and the same storage as numbers."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(16))

    def forward(self, data):
        return (self.one * data[1:5]).sum() + (self.other * data.view(torch.float32)).sum()


@pytest.mark.parametrize("in_flight_bytes", [0, 1 << 30])
def test_bytes_that_are_saved_as_numbers_too(in_flight_bytes):
    plain, swapped = Bytes(), swap_wrapper(Bytes(), everything)
    data = torch.ones(16).view(torch.uint8).clone()
    with cpu_engine(in_flight_bytes=in_flight_bytes, delay_s=lambda: 0.05):
        for module in (plain, swapped):
            module(data).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), swapped.parameters(), strict=True))


def test_parameters_their_views_their_casts_and_buffers_never_move():
    def weights(region, x):
        w = region.weight
        return (
            w,
            w.t(),
            w[:1],
            w.view(-1),
            w.to(torch.bfloat16),
            w.to(torch.bfloat16).t(),
            region.table,
            region.table.t(),
        )

    with cpu_engine():
        back, _, counters = run(weights)
        assert counters.registered_tensors == 0
        assert len(back) == 8


def test_lazily_conjugated_and_negated_tensors_stay():
    def lazy(region, x):
        z = torch.view_as_complex(x.detach().reshape(-1, 2).contiguous())
        return z.conj(), z.conj().imag

    with cpu_engine():
        back, expected, counters = run(lazy)
        assert counters.registered_tensors == 0
        assert all(torch.equal(a, b) for a, b in zip(back, expected, strict=True))


def test_subclasses_stay():
    class Marked(torch.Tensor):
        pass

    with cpu_engine():
        back, _, counters = run(lambda region, x: (x.detach().clone().as_subclass(Marked),))
        assert counters.registered_tensors == 0
        assert isinstance(back[0], Marked)


def test_the_original_is_really_dropped_and_really_read_back():
    kept = []

    def make(region, x):
        activation = x * 2
        kept[:] = [weakref.ref(activation), activation.untyped_storage()._weak_ref()]
        return (activation,)

    with cpu_engine() as engine:
        region = swap_wrapper(Region(make), everything)
        out = region(torch.randn(64, 64, requires_grad=True))
        engine.finish()
        assert kept[0]() is None
        assert torch.UntypedStorage._expired(kept[1])
        assert engine.pool.in_use_bytes == 64 * 64 * 4
        out.sum().backward()
        assert engine.pool.in_use_bytes > 0, "backward read it from there"


@pytest.mark.parametrize("end", ["no backward", "dropped graph", "cycle"])
def test_a_graph_without_backward_leaves_nothing(end):
    with cpu_engine() as engine:
        model, inputs = models.SharedAttention(), models.hidden()
        memopt.apply(model, SWAP, inputs)
        for _ in range(3):
            loss = model(inputs)
            if end == "cycle":
                cycle = [loss]
                cycle.append(cycle)
                del cycle
            if end == "dropped graph":
                loss = loss.detach()
        del loss
        assert_empty(engine)
        assert_equal_steps(models.SharedAttention(), model, inputs)


def test_a_full_pool_keeps_tensors_on_the_device_and_says_so_once():
    with cpu_engine(cap_bytes=1 << 20) as engine:
        model, inputs = models.SharedAttention(), models.hidden()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            memopt.apply(model, SWAP, inputs)
            assert_equal_steps(models.SharedAttention(), model, inputs)
        assert [str(w.message)[:29] for w in caught if "pool" in str(w.message)] == ["memopt: the host pool is full"]
        assert engine.pool.held_bytes <= 1 << 20
        assert 0 < counters_of(model.blocks[0].self_attn).copied_out_bytes


def test_finalizers_run_in_other_threads_and_inside_the_collector():
    with cpu_engine() as engine:
        model, inputs = models.SharedAttention(), models.hidden(seq_length=512)
        memopt.apply(model, SWAP, inputs)
        losses = [model(inputs) for _ in range(4)]
        gc.collect()
        threading.Thread(target=losses.clear).start()
        cycle = [model(inputs)]
        cycle.append(cycle)
        del cycle
        before = gc.get_threshold()
        gc.set_threshold(1)  # collect all the time: inside pack, inside the engine's lock
        try:
            assert_equal_steps(models.SharedAttention(), model, inputs)
        finally:
            gc.set_threshold(*before)
        assert_empty(engine)


class WritingLater(nn.Module):
    """Save a tensor, then write to it when told to."""

    def __init__(self, keep_out):
        super().__init__()
        self.anchor = nn.Parameter(torch.ones(1))
        self.keep_out = keep_out

    def forward(self, x):
        y = x.sigmoid()  # saves its output
        if self.keep_out == "inside":
            z = y * 1
            y.mul_(2)
            return z
        return y


@pytest.mark.parametrize("when", ["inside", "during", "after"])
@pytest.mark.parametrize("policy", [everything, lambda t: memopt.CheckpointPolicy.MUST_SAVE], ids=["swapped", "kept"])
def test_writing_in_place_after_the_save_is_as_loud_as_in_autograd(when, policy):
    x = torch.randn(512, 512, requires_grad=True)
    slow = {"delay_s": lambda: 0.05, "in_flight_bytes": 1 << 30} if when == "during" else {}
    with cpu_engine(**slow) as engine:
        region = swap_wrapper(WritingLater(when), policy)
        out = region(x)
        z = out * 1
        if when == "after":
            engine.finish()
        if when != "inside":
            with torch.no_grad():
                out.mul_(2)
        with pytest.raises(SavedTensorModifiedError, match="modified by an inplace operation"):
            z.sum().backward()
        with pytest.raises(RuntimeError):
            z.sum().backward()
        del z, out


class Scale(torch.autograd.Function):
    """A loss kernel of the kind that scales in place, in backward, what it kept."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.save_for_backward(kept)
        return (x * kept).sum()

    @staticmethod
    def backward(ctx, grad):
        (kept,) = ctx.saved_tensors
        return kept.mul_(grad), None


class Scaling(nn.Module):
    def __init__(self, times):
        super().__init__()
        self.anchor = nn.Parameter(torch.ones(1))
        self.times = times

    def forward(self, x):
        kept = torch.ones(4)
        return sum(Scale.apply(x, kept) for _ in range(self.times))


@pytest.mark.parametrize("in_flight_bytes", [0, 1 << 30], ids=["left", "still there"])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("case", ["two nodes", "twice"])
def test_writing_in_place_in_backward_is_as_loud_as_in_autograd(case, wrapped, in_flight_bytes):
    """Else the second reader of the same storage would get scaled values."""
    with cpu_engine(in_flight_bytes=in_flight_bytes):
        region = Scaling(2 if case == "two nodes" else 1)
        if wrapped:
            swap_wrapper(region, everything)
        x = torch.zeros(4, requires_grad=True)
        loss = region(x) * 3
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            for _ in range(2):
                torch.autograd.grad(loss, x, retain_graph=True)
        del loss


def test_writing_in_place_in_backward_once_is_fine():
    with cpu_engine():
        region = swap_wrapper(Scaling(1), everything)
        x = torch.zeros(4, requires_grad=True)
        (grad,) = torch.autograd.grad(region(x) * 3, x)
        assert torch.equal(grad, torch.full((4,), 3.0))


def test_writing_in_place_before_the_save_is_fine():
    class Before(nn.Module):
        def forward(self, x):
            y = x * 2
            y.add_(1)
            return y.sigmoid() * y

    with cpu_engine(poison=True):
        x = torch.randn(64, 64, requires_grad=True)
        (want,) = torch.autograd.grad(Before()(x).sum(), x)
        (got,) = torch.autograd.grad(swap_wrapper(Before(), everything)(x).sum(), x)
        assert torch.equal(got, want)


def test_a_saved_output_that_is_filled_after_it_is_packed():
    """RReLU registers its noise for backward before the kernel fills it."""
    with cpu_engine(poison=True):
        region = nn.Sequential(nn.Linear(64, 64), nn.RReLU())
        x = torch.randn(32, 64)
        grads = []
        for wrapped in (False, True):
            if wrapped:
                swap_wrapper(region, everything)
            torch.manual_seed(3)
            grads.append(torch.autograd.grad(region(x).sum(), list(region.parameters())))
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
        assert counters_of(region).copied_out_tensors > 0


def test_eval_no_grad_and_inference_mode_take_no_part():
    with cpu_engine() as engine:
        model, inputs = models.llama(), models.batch()
        handle = memopt.apply(model, SWAP, inputs)
        with torch.no_grad():
            model(**inputs)
        with torch.inference_mode():
            model.eval()(**inputs)
        model.generate(inputs["input_ids"][:, :4], max_new_tokens=3, do_sample=False)
        assert handle.stats().registered_tensors == 0
        assert engine.pool.held_bytes == 0
        model.train()
        assert_equal_steps(models.llama(), model, inputs)
        step(model, inputs)
