"""What a second pair of eyes broke: saves that look alike, writes unseen, streams, interrupts, torch's other machinery."""

import copy
import gc
import itertools

import pytest
import torch
import torch.autograd.forward_ad as fw
from torch import nn
from torch.nn.utils import parametrize
from transformers import DynamicCache

import memopt
from memopt.errors import GraphCompileError, MemoptError
from memopt.runtime import finish_copies, swap_wrapper
from memopt.runtime.settling import settle_copies
from memopt.runtime.slot import State
from tests import models
from tests.runtime.engines import counters_of, cpu_engine, everything
from tests.runtime.steps import SWAP, assert_equal_steps


@pytest.fixture(autouse=True)
def engine():
    with cpu_engine(poison=True) as engine:
        yield engine


class Times(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4, dtype=dtype))

    def forward(self, x):
        return x * self.w


def gradient(module, x):
    module.w.grad = None
    loss = module(x).abs().sum() if x.is_complex() else module(x).sum()
    finish_copies(module)
    loss.backward()
    return module.w.grad


def test_lazily_conjugated_and_negated_saves_where_plain_ones_were_learned():
    z = torch.randn(4, 4, dtype=torch.complex64)
    for dtype, inputs in ((torch.float32, (z.imag, z.imag, z.conj().imag)), (torch.complex64, (z, z, z.conj()))):
        module, plain = swap_wrapper(Times(dtype), everything), Times(dtype)
        for x in inputs:
            assert torch.equal(gradient(module, x), gradient(plain, x))


def test_a_parameter_where_an_activation_was_learned_stays():
    class Changing(Times):
        def forward(self, x):
            return (x * 2).sin() if self.way else self.w.sin() + x

    module = swap_wrapper(Changing(), everything)
    x = torch.randn(4, 4, requires_grad=True)
    for way in (True, True, False):
        module.way = way
        before = counters_of(module).registered_tensors
        module(x).sum().backward()
    assert counters_of(module).registered_tensors == before


def test_a_slice_of_a_large_storage_where_a_whole_one_was_learned_stays():
    module = swap_wrapper(Times())
    module.w = nn.Parameter(torch.ones(512, 512))
    whole, large = torch.randn(512, 512, requires_grad=True), torch.randn(4096, 512, requires_grad=True)
    for x in (whole, whole):
        module(x).sum().backward()
    before = counters_of(module).registered_bytes
    module(large[:512]).sum().backward()
    assert before == 2 * whole.nbytes
    assert counters_of(module).registered_bytes == before


def test_the_policy_is_asked_of_each_tensor():
    asked = []

    def counting(tensor):
        asked.append(tensor.shape)
        return memopt.CheckpointPolicy.MUST_SWAP

    module = swap_wrapper(Times(), counting)
    for _ in range(3):
        module(torch.ones(4, 4)).sum().backward()
    assert len(asked) == 3 * len(asked[: len(asked) // 3]) > 0


def test_a_write_that_no_version_shows_is_not_shared_between_forwards():
    plain, module = Times(), swap_wrapper(Times(), everything)
    results = []
    for one in (plain, module):
        x = torch.ones(4, 4)
        earlier = one(x).sum()  # a loss that somebody keeps
        finish_copies(one)
        x.data.fill_(5.0)
        one(x).sum().backward()
        results.append(one.w.grad)
        del earlier
    assert torch.equal(*results)


def test_a_write_through_another_tensor_on_the_storage_is_loud():
    """Autograd would give wrong values here: the second tensor has a version of its own, which nobody bumps."""

    class Aliasing(Times):
        def forward(self, x):
            h = x * 2
            out = h * self.w + h.data * self.w
            h.add_(1)
            return out

    module = swap_wrapper(Aliasing(), everything)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        module(torch.ones(4, 4)).sum().backward()


def test_every_stream_waits_for_itself(engine):
    class Streams(type(engine.backend)):
        stream, waited = 0, ()

        def here(self):
            return self.stream

        def wait(self, event, target):
            self.waited = (*self.waited, self.stream)
            super().wait(event, target)

    engine.backend.__class__ = Streams
    module = swap_wrapper(nn.Sequential(nn.Tanh(), nn.Sigmoid()), everything)
    loss = module(torch.randn(8, 8, requires_grad=True)).sum()
    finish_copies(models.Attention())
    (slot, *_) = {s for s in gc.get_objects() if type(s).__name__ == "Slot" and s.state is State.HOST}
    for stream in (1, 2, 1):
        engine.backend.stream = stream
        engine.tensor_of(slot, counters_of(module))
    assert engine.backend.waited == (1, 2)
    del slot
    loss.backward()


def test_forward_mode_differentiation_steps_aside():
    x = torch.randn(2, 4, requires_grad=True)
    module = swap_wrapper(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), everything)
    with fw.dual_level():
        (grad,) = torch.autograd.grad(module(fw.make_dual(x, torch.ones_like(x))).sum(), x)
        assert fw.unpack_dual(grad).tangent is not None
    assert counters_of(module).registered_tensors == 0


def test_torch_contexts_that_need_the_saved_tensors_themselves():
    module = swap_wrapper(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), everything)
    x = torch.randn(2, 4, requires_grad=True)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        module(x).sum().backward()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        out = module(x)
        out.mul_(2)
        out.sum().backward()
    assert counters_of(module).registered_tensors == 0


def test_sparse_and_scripted_things_inside_a_region():
    class Sparse(Times):
        def __init__(self):
            super().__init__()
            self.scripted = torch.jit.script(nn.Linear(4, 4))

        def forward(self, a):
            return self.scripted(a @ self.w)

    module = swap_wrapper(Sparse(), everything)
    for _ in range(2):
        module(torch.eye(4).to_sparse_csr()).sum().backward()
    assert module.w.grad is not None


def test_an_interrupt_while_learning_leaves_nothing_that_acts(monkeypatch):
    from torch.utils.hooks import RemovableHandle

    plain, module = models.SharedAttention(), models.SharedAttention()
    memopt.apply(module, SWAP, models.hidden())
    remove, calls = RemovableHandle.remove, []

    def interrupted(handle):
        if not calls:
            calls.append(handle)
            raise KeyboardInterrupt
        remove(handle)

    monkeypatch.setattr(RemovableHandle, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        module(models.hidden())
    assert calls
    assert_equal_steps(plain, module, models.hidden())
    assert {*module._forward_hooks.values()} == {settle_copies}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules() if m is not module)


def test_a_lazy_rewriting_survives_a_first_forward_that_fails():
    model = models.llama(num_hidden_layers=2)
    handle = memopt.apply(model, SWAP)
    with pytest.raises(ValueError):
        model(input_ids=None)
    assert_equal_steps(models.llama(num_hidden_layers=2), model, models.batch())
    assert handle.stats().copied_out_tensors > 0


def test_arguments_without_end_are_no_part_of_the_signature():
    class Taking(Times):
        def forward(self, x, extra):
            return x * self.w

    loop = []
    loop.append(loop)
    module = swap_wrapper(Taking(), everything)
    for extra in (loop, list(range(200_000)), {"a": loop}):
        module(torch.ones(4, 4), extra).sum().backward()


def wrongs():
    lazy, parametrized = nn.LazyLinear(4), nn.Linear(4, 4)
    parametrize.register_parametrization(parametrized, "weight", nn.Identity())
    return {
        "has parameters without a shape": lambda: swap_wrapper(lazy),
        "is parametrized itself": lambda: swap_wrapper(parametrized),
        "has no forward": lambda: swap_wrapper(nn.ModuleList()),
        "policy_fn=7 is not legal": lambda: swap_wrapper(nn.Linear(1, 1), 7),
        "policy_fn='attn' is not legal": lambda: swap_wrapper(nn.Linear(1, 1), "attn"),
        "legal: a torch.nn.Module": lambda: swap_wrapper(len),
        "model='str' is not legal": lambda: memopt.apply("m", SWAP),
        "graph='Linear' is not legal": lambda: memopt.plan(nn.Linear(1, 1), **SWAP),
        "no pass is called 'attention-swop'": lambda: memopt.plan(traced(), passes=["attention-swop"]),
        "legal: a memopt.CheckpointPolicy": lambda: swap_wrapper(Times(), lambda t: [1])(torch.ones(4, 4)),
    }


def traced():
    return memopt.analyze(models.SharedAttention(), models.hidden(seq_length=8))


@pytest.mark.parametrize("message", wrongs())
def test_wrong_use_is_told_in_one_line(message):
    with pytest.raises(MemoptError, match=message) as caught:
        wrongs()[message]()
    assert "\n" not in str(caught.value)


def test_a_module_cannot_follow_itself_and_a_circle_ends():
    module, manager = swap_wrapper(Times(), everything), memopt.SwapManager()
    with pytest.raises(MemoptError, match="cannot follow itself"):
        manager.set_forward_prefetch_layer(module, module)
    ring = nn.Sequential(*(swap_wrapper(Times(), everything) for _ in range(3)))
    for current, following in (*itertools.pairwise(ring), (ring[2], ring[0])):
        manager.set_forward_prefetch_layer(current, following)
    for _ in range(3):
        ring(torch.ones(4, 4)).sum().backward()


def test_what_is_compiled_or_scripted_is_not_wrapped():
    with pytest.raises(GraphCompileError):
        swap_wrapper(torch.compile(Times(), backend="eager"))
    with pytest.raises(GraphCompileError):
        swap_wrapper(torch.jit.script(nn.Linear(4, 4)))
    model = models.llama(num_hidden_layers=1)
    memopt.apply(model, SWAP)
    torch._dynamo.reset()
    with pytest.raises(GraphCompileError):
        torch.compile(model, backend="eager")(**models.batch(seq_length=8))


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Force(nn.Module):
    """Return an energy and its slope, as force fields do: the graph is used up within forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        energy = Squared.apply(self.linear(x)).sum()
        return energy, torch.autograd.grad(energy, x)[0]


def test_a_graph_that_forward_itself_has_used_up():
    plain = Force()
    module = swap_wrapper(copy.deepcopy(plain), everything)
    for _ in range(2):
        x = torch.randn(3, 4, requires_grad=True)
        assert all(map(torch.equal, plain(x), module(x)))


def test_backward_under_inference_mode():
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    module, x, grads = swap_wrapper(copy.deepcopy(plain), everything), torch.randn(3, 4), []
    for one in (plain, module):
        loss = one(x).sum()
        finish_copies(one)
        with torch.inference_mode():
            loss.backward()
        grads.append([p.grad for p in one.parameters()])
    assert all(map(torch.equal, *grads))
    assert counters_of(module).copied_in_bytes > 0


def test_values_that_a_parameter_is_given_between_forward_and_backward():
    module, plain, slopes = swap_wrapper(Times(), everything), Times(), []
    for one in (plain, module):
        x = torch.ones(4, 4, requires_grad=True)
        y = one(x).sum()
        one.w.data = torch.full((4, 4), 5.0)
        slopes.append(torch.autograd.grad(y, x)[0])
    assert torch.equal(*slopes)
    assert slopes[0][0, 0] == 5


def test_saves_that_have_no_storage_stay():
    class Zeroed(Times):
        def forward(self, x):
            return (x * self.w) * torch._efficientzerotensor((4, 4))

    module, x = swap_wrapper(Zeroed(), everything), torch.randn(4, 4)
    assert torch.equal(gradient(module, x), torch.zeros(4, 4))


def test_an_output_that_holds_itself():
    class Cyclic(Times):
        def forward(self, x):
            out = {"y": super().forward(x)}
            out["self"] = out
            return out

    module, x = swap_wrapper(Cyclic(), everything), torch.randn(4, 4)
    for _ in range(2):
        module.w.grad = None
        module(x)["y"].sum().backward()
        assert torch.equal(module.w.grad, x)


def test_arguments_of_any_kind_are_not_touched_by_the_trace():
    class Collecting(nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn = nn.Linear(256, 1024)

        def forward(self, x, seen):
            seen.found.append(self.self_attn(x))
            return seen.found[-1].sum()

    class Seen:
        def __init__(self):
            self.found = [torch.zeros(2)]

    model, seen, x = Collecting(), Seen(), torch.randn(1024, 256)
    memopt.apply(model, SWAP)
    model(x, seen).backward()
    assert [type(t) for t in seen.found] == [torch.Tensor] * 2
    with pytest.raises(MemoptError, match="generator cannot be copied"):
        memopt.analyze(model, (x, (n for n in range(3))))


def test_a_cache_that_the_caller_brings_stays_his_own():
    plain, batch = models.llama(), models.batch(seq_length=8)
    model = copy.deepcopy(plain)
    memopt.apply(model, SWAP)
    losses = [
        m(**{**batch, "use_cache": True}, past_key_values=DynamicCache(config=m.config)).loss for m in (plain, model)
    ]
    assert torch.equal(*losses)


def test_modules_that_admit_no_subclass_or_no_new_attribute():
    class Strict(nn.Linear):
        def __init_subclass__(cls, *, family):
            super().__init_subclass__()

    with pytest.raises(MemoptError, match="admits no subclass"):
        swap_wrapper(Strict(2, 2), everything)

    class Frozen(nn.Linear):
        def __setattr__(self, name, value):
            if "bias" in self.__dict__.get("_parameters", ()):
                raise AttributeError(name)
            super().__setattr__(name, value)

    module = Frozen(2, 2)
    swap_wrapper(module, everything)
    memopt.undo(module)
    assert type(module) is Frozen
    for call in (lambda: memopt.undo("model"), lambda: swap_wrapper(module, everything, group_swap="yes")):
        with pytest.raises(MemoptError, match="legal"):
            call()
