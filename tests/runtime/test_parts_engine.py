"""How regions go out and come back: limits, marks, gathered and shared views, and what a forward may do meanwhile."""

import copy
import functools
import gc
import pickle
import random
import threading
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.ir import account
from memopt.runtime import marks
from memopt.runtime.engine import Engine
from tests import zoo
from tests.runtime.engines import assert_empty, cpu_engine
from tests.runtime.offloads import (
    PARADIGM,
    assert_as_planned,
    assert_exact,
    assert_same_step,
    offload,
    recompute,
    rewritten,
)
from tests.runtime.parts import WIDTH, Product, Stack, hidden, words
from tests.runtime.steps import assert_equal_gradients, gradients

ATTENTION = offload("core_attn", "attn_proj", "attn_norm")
CONFIGS = {
    "offload": ATTENTION,
    "both": ATTENTION | recompute("layernorm"),
    "module": offload("module:model.layers.*"),
}


class Saving(torch.autograd.Function):
    """Save some tensors and note, in backward, what comes back of them."""

    @staticmethod
    def forward(ctx, x, seen, *saved):
        ctx.save_for_backward(*saved)
        ctx.seen = seen
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.extend(ctx.saved_tensors)
        return grad, None, *[None] * len(ctx.saved_tensors)


class Views(nn.Module):
    """Saves views of a tensor that it makes."""

    def __init__(self, make):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.make, self.seen, self.saved = make, [], []

    def forward(self, x):
        whole = torch.arange(64.0 * 64).view(64, 64).clone()
        views = self.make(whole)
        self.saved.extend((view.clone(), view.stride()) for view in views)
        return Saving.apply(x * self.weight, self.seen, *views)


# ---- how many groups are on their way ----


@pytest.mark.parametrize("limit", [0, 1, 2, None])
def test_no_more_groups_than_allowed_are_on_their_way(limit, monkeypatch):
    """Fault: a limit that is not joined at every commit: memory that should be free is not."""
    underway, copy_out = [], Engine.copy_out

    def noting(engine, slots, counters, **limits):
        copy_out(engine, slots, counters, **limits)
        underway.append(len(engine._leaving))

    plain, inputs = zoo.ZOO["llama"](num_hidden_layers=6), zoo.batch("llama")
    delay_s = 0.05 if limit is not None else 0.3  # the first is to be on its way still when the last one starts
    with cpu_engine(delay_s=lambda: delay_s, poison=True, in_flight_bytes=1 << 30):
        model, _ = rewritten(plain, offload("core_attn", "attn_proj", max_inflight=limit), inputs)
        monkeypatch.setattr(Engine, "copy_out", noting)
        assert_same_step(plain, model, inputs)
    assert len(underway) == 6
    assert max(underway) == 6 if limit is None else max(underway) == limit


def test_the_pool_s_statistics_are_of_one_step():
    """Fault: counters that are never reset, or a pool that grows in every step."""
    plain, inputs = zoo.ZOO["llama"](), zoo.batch("llama")
    with cpu_engine(poison=True):
        model, handle = rewritten(plain, ATTENTION, inputs)
        totals, cpu = account(handle.plan), torch.device("cpu")
        zoo.train_step(model, inputs)
        first = handle.pool_stats()[cpu]
        assert (first.num_hits + first.num_misses, first.in_use_bytes) == (totals.num_tensors, 0)
        assert first.num_misses > 0
        for _ in range(3):
            handle.reset_pool_stats()
            assert handle.pool_stats()[cpu].peak_bytes == 0
            zoo.train_step(model, inputs)
            stats = handle.pool_stats()[cpu]
            assert (stats.num_hits, stats.num_misses) == (totals.num_tensors, 0)
            assert (stats.held_bytes, stats.in_use_bytes) == (first.held_bytes, 0)
            assert totals.swap_bytes <= stats.peak_bytes <= totals.swap_bytes + 512 * totals.num_tensors


# ---- marks ----


class Marking(nn.Module):
    """Marks what its norm is called with, or a view of it."""

    def __init__(self):
        super().__init__()
        self.input_layernorm, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mark = None

    def forward(self, x):
        x = x * 1
        if self.mark:
            memopt.mark_not_offload(self.mark(x))
        return x + self.mlp(self.input_layernorm(x))


@pytest.mark.parametrize("mark", [lambda x: x, lambda x: x[:1], lambda x: x.view(-1).detach()], ids="tvd")
def test_a_marked_tensor_stays_and_its_mark_dies_with_it(mark):
    """Fault: a mark on the Python object, which autograd's hooks do not get to see."""
    plain, x = Stack(Marking), hidden()
    with cpu_engine(poison=True):
        model, handle = rewritten(plain, offload("attn_norm"), x)
        planned = account(handle.plan).swap_bytes
        whole = x.numel() * 4
        assert planned >= 3 * whole
        for layer in (0, 2):
            for one in (plain, model):
                one.layers[layer].mark = mark
            before = handle.stats().copied_out_bytes
            for _ in range(3):  # the first calls were learned without a mark
                assert_same_step(plain, model, x)
            marked = 1 if layer == 0 else 2
            assert handle.stats().copied_out_bytes - before == 3 * (planned - marked * whole)
        gc.collect()
        memopt.mark_not_offload(torch.ones(1))
        assert len(marks._marked) <= 1


# ---- gathered views ----

VIEWS = {
    "contiguous": lambda t: (t[:8],),
    "transposed": lambda t: (t[:8].t(),),
    "strided": lambda t: (t[::8, ::2],),
    "scalar": lambda t: (t[3, 5],),
    "expanded": lambda t: (t[0].expand(4, 64),),
    "column": lambda t: (t[:, 3],),
    "permuted": lambda t: (t[:8].view(2, 4, 64).permute(2, 0, 1),),
    "two": lambda t: (t[:4], t[8:12].t()),
    "same twice": lambda t: (t[:4], t[:4]),
    "other type": lambda t: (t[:4].view(torch.int32),),
    "empty": lambda t: (t[:0], t[:4]),
}


@pytest.mark.parametrize("cap_bytes", [1 << 30, 1 << 12, 0], ids=["", "nearly-full", "full"])
@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
@pytest.mark.filterwarnings("ignore:memopt. the host pool")
def test_of_a_small_view_only_its_own_bytes_move_and_it_comes_back_as_it_was(make, cap_bytes):
    """Faults: strides or offset lost; a view that was not copied, the pool being full, taken for a gathered one."""
    plain = nn.Sequential(Views(make))
    with cpu_engine(poison=True, cap_bytes=cap_bytes):
        model = copy.deepcopy(plain)
        handle = memopt.apply(model, memopt.plan(memopt.analyze(plain, hidden()), **offload("module:0")))
        region = model[0]
        for _ in range(3):
            region.seen.clear()
            region.saved.clear()
            before = handle.stats().copied_out_bytes
            model(hidden()).sum().backward()
            for back, (values, strides) in zip(region.seen, region.saved, strict=True):
                assert torch.equal(back, values)
                assert back.dtype is values.dtype
                assert back.stride() == strides
            if cap_bytes > 1 << 12:
                assert handle.stats().copied_out_bytes - before == account(handle.plan).swap_bytes
            del back, values
        region.seen.clear()


# ---- shared by layers ----


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        return Product.apply(self.mlp(x), mask)


class Masking(Stack):
    """Makes a large mask for all of its layers."""

    def forward(self, x):
        return super().forward(x, (x > 0).to(x.dtype))


def test_a_mask_of_all_layers_moves_once():
    """Fault: what several layers save is copied by each of them."""
    plain = Masking(Masked, num_layers=4)
    mask = hidden().numel() * 4
    with cpu_engine(poison=True):
        model, handle = rewritten(plain, offload("module:layers.*"), hidden())
        for seed in range(3):
            before = handle.stats()
            assert_same_step(plain, model, hidden(seed))
            after = handle.stats()
            assert after.copied_out_bytes - before.copied_out_bytes == account(handle.plan).swap_bytes
            assert after.copied_in_bytes == after.copied_out_bytes
        assert account(handle.plan).offload.duplicate_bytes == 3 * mask


# ---- forwards that differ, break off, or run beside each other ----


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("config", [PARADIGM, offload("expert_fc1", "moe_act", "moe_fc2", "core_attn", "attn_proj")])
def test_a_loop_over_experts_saves_otherwise_in_every_call(name, config):
    """Fault: what was learned of one call is taken for another's, whose experts got other numbers of tokens."""
    plain = zoo.ZOO[name]()
    graph = memopt.analyze(plain, words(12))  # of the fused ones: how a loop goes on, only data can tell
    plain.set_experts_implementation("eager")
    with cpu_engine(poison=True):
        model = copy.deepcopy(plain)
        handle = memopt.apply(model, memopt.plan(graph, **config))
        for seed in range(6):
            assert not zoo.differing(*(zoo.train_step(m, words(12, seed=seed)) for m in (plain, model)))
        assert handle.stats().copied_out_bytes > 0


@pytest.mark.filterwarnings("ignore:memopt. the host pool")
@given(
    seed=st.integers(0, 2**16),
    config=st.sampled_from([*CONFIGS.values(), offload("core_attn", "attn_proj", fraction=0.5, max_inflight=1)]),
    slowest_ms=st.sampled_from([0, 1, 8]),
    in_flight_bytes=st.sampled_from([0, 20_000, 1 << 30]),
    backward_order=st.permutations(range(3)),
    lengths=st.lists(st.sampled_from([5, 12]), min_size=3, max_size=3),
    cap_bytes=st.sampled_from([4_000, 60_000, 1 << 30]),
)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_schedule_of_copies_changes_a_gradient(
    seed, config, slowest_ms, in_flight_bytes, backward_order, lengths, cap_bytes
):
    schedule = random.Random(seed)

    def delay_s():
        return schedule.choice((0, slowest_ms)) / 1000 * schedule.random()

    plain = PLAIN
    with cpu_engine(delay_s=delay_s, poison=True, cap_bytes=cap_bytes, in_flight_bytes=in_flight_bytes):
        model = copy.deepcopy(plain)
        memopt.apply(model, _plan(config))
        for _ in range(2):
            for one in (plain, model):
                one.zero_grad()
                losses = [one(**words(length, seed=number)).loss for number, length in enumerate(lengths)]
                for index in backward_order:
                    losses[index].backward()
            assert_equal_gradients(gradients(plain), gradients(model))
        del losses


PLAIN = zoo.ZOO["llama"](num_hidden_layers=3)


@functools.cache
def _graph():
    return memopt.analyze(PLAIN, words(12))


def _plan(config):
    return memopt.plan(_graph(), **config)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_swaps_on_its_own_and_both_can_be_undone(config, duplicate):
    plain, inputs = zoo.ZOO["llama"](), zoo.batch("llama")
    with cpu_engine(poison=True):
        model, handle = rewritten(plain, config, inputs)
        assert_same_step(plain, model, inputs)
        other = duplicate(model)
        before = handle.stats()
        assert_same_step(plain, other, inputs)
        assert handle.stats() == before
        assert_as_planned(handle, model, inputs)
        loss = model(**inputs).loss
        handle.undo()
        memopt.undo(other)
        model.zero_grad()
        loss.backward()
        assert_equal_gradients(gradients(plain), gradients(model))
        for one in (model, other):
            assert [type(m) for m in one.modules()] == [type(m) for m in plain.modules()]
            assert_same_step(plain, one, inputs)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("number", [0, 1, 3], ids="first {0}".format)
def test_a_forward_that_breaks_off_leaves_nothing(config, number):
    plain, inputs = zoo.ZOO["llama"](num_hidden_layers=3), zoo.batch("llama")

    def fail(*_):
        raise RuntimeError("in the middle")

    with cpu_engine(poison=True) as engine:
        model, handle = rewritten(plain, config, inputs)
        for _ in range(number):
            assert_same_step(plain, model, inputs)
        hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="in the middle") as caught:
            model(**inputs)
        hook.remove()
        caught.value.__traceback__ = None
        del caught
        assert_empty(engine)
        for length in (12, 20, 12):
            for _ in range(2):
                assert_same_step(plain, model, words(length))
        assert_as_planned(handle, model, inputs)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_threads_with_a_model_and_without(config):
    plain = zoo.ZOO["llama"]()
    inputs = [words(length, seed=length) for length in (12, 20, 7, 12)]
    expected = [torch.autograd.grad(plain(**one).loss, plain.parameters()) for one in inputs]
    with cpu_engine(poison=True, delay_s=lambda: 0.001):
        model, _ = rewritten(plain, config, inputs[0])
        wrong = []

        def work(number):
            try:
                for _ in range(3):
                    grads = torch.autograd.grad(model(**inputs[number]).loss, model.parameters())
                    wrong.extend(number for pair in zip(grads, expected[number], strict=True) if not torch.equal(*pair))
            except BaseException as error:
                wrong.append(repr(error))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(inputs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_torch_s_checkpoint_around_a_layer(config, use_reentrant):
    """Fault: regions inside of a checkpoint, which drops their saves, take part, in its forward or in its replay."""
    plain, inputs = zoo.ZOO["llama"](num_hidden_layers=3), zoo.batch("llama", use_cache=False)
    with cpu_engine(poison=True):
        model, handle = rewritten(plain, config, inputs)
        for one in (plain, model):
            layer = one.model.layers[1]
            forward = layer.forward

            def checkpointed(*args, forward=forward, **kwargs):
                return checkpoint(partial(forward, **kwargs), *args, use_reentrant=use_reentrant)

            layer.forward = checkpointed
        assert_exact(plain, model, inputs, steps=3)
        assert handle.stats().copied_out_bytes > 0


@pytest.mark.parametrize("config", [ATTENTION, PARADIGM], ids=["offload", "paradigm"])
def test_adapters_are_exact_and_move_their_plan(config):
    peft = pytest.importorskip("peft")
    base = zoo.ZOO["qwen3_moe"]()
    lora = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "o_proj"], lora_dropout=0.1, init_lora_weights=False
    )
    torch.manual_seed(0)
    plain, inputs = peft.get_peft_model(base, lora), zoo.batch("qwen3_moe")
    with cpu_engine(poison=True):
        model, handle = rewritten(plain, config, inputs)
        assert account(handle.plan).swap_bytes > 0
        assert_as_planned(handle, model, inputs)
        assert_exact(plain, model, inputs, steps=3)
        assert_as_planned(handle, model, inputs)
