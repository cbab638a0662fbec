"""Shapes change between steps: exact at every step, decided anew by the plan's own rules, and nothing is left."""

import copy
import functools

import pytest
import torch
from torch import nn

import memopt
from memopt.ir import account
from memopt.runtime import CpuBackend
from tests import zoo
from tests.runtime.engines import assert_empty, cpu_engine
from tests.runtime.offloads import PARADIGM, assert_same_step, offload, recompute, rewritten
from tests.runtime.parts import WIDTH, Product, Stack, hidden, words

ASKED = ("core_attn", "attn_proj", "attn_norm", "mlp_norm")
LATER_STAGE = {"pp_size": 2, "pp_rank": 1}
PLANNED, LONGER, SHORTER = words(12), words(20), words(7)
SMALLER = words(12, batch_size=1)
CONFIGS = {
    "all": offload(*ASKED),
    "margin auto": offload(*ASKED, margin="auto"),
    "margin": offload(*ASKED, margin=20_000),
    "smallest": offload(*ASKED, min_tensor_elements=900),
    "delta": offload(*ASKED, pp_rank_delta_bytes=20_000) | LATER_STAGE,
    "fraction": offload(*ASKED, fraction=0.5),
    "everything": offload(*ASKED, fraction=0.7, margin=9_000, pp_rank_delta_bytes=15_000, min_tensor_elements=300)
    | LATER_STAGE
    | recompute("layernorm"),
    "paradigm": PARADIGM,
}


@functools.cache
def graph_of(name, num_layers, batch_size, length):
    """Trace a model once for each shape."""
    return memopt.analyze(zoo.ZOO[name](num_hidden_layers=num_layers), words(length, batch_size))


def planned_bytes(name, config, inputs, num_layers=3):
    graph = graph_of(name, num_layers, *inputs["input_ids"].shape)
    return account(memopt.plan(graph, **config)).swap_bytes


def moved(handle, run):
    before = handle.stats().copied_out_bytes
    run()
    return handle.stats().copied_out_bytes - before


CASES = [("qwen3_moe", config) for config in CONFIGS] + [("llama", config) for config in list(CONFIGS)[::3]]


@pytest.mark.parametrize(("name", "config"), CASES)
def test_new_shapes_are_exact_at_once_and_then_as_a_plan_for_them_would_be(name, config):
    """Fault: rules that were followed by position, or by the sizes of the first shape."""
    config, plain = CONFIGS[config], zoo.ZOO[name](num_hidden_layers=3)
    with cpu_engine(poison=True) as engine:
        model, handle = rewritten(plain, config, PLANNED)
        for inputs in (PLANNED, LONGER, SHORTER, SMALLER, PLANNED):
            assert_same_step(plain, model, inputs)
            planned = planned_bytes(name, config, inputs)
            for _ in range(2):
                assert moved(handle, lambda inputs=inputs: assert_same_step(plain, model, inputs)) == planned
            assert_empty(engine)


@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("settings", ["margin", "delta"])
@pytest.mark.parametrize("layer", [1, 2])
def test_the_byte_at_which_a_rule_turns_is_the_plan_s(layer, settings, offset):
    """Fault: sizes of layers that are a table of positions too large."""
    plain = zoo.ZOO["llama"](num_hidden_layers=3)
    shares = "module:model.layers.*"
    groups = account(memopt.plan(graph_of("llama", 3, *LONGER["input_ids"].shape), **offload(shares))).offload.groups
    edge = sum(group.moved_bytes for group in (groups[layer:] if settings == "margin" else groups[:layer])) + offset
    config = offload(shares, margin=edge)
    if settings == "delta":
        config = offload(shares, pp_rank_delta_bytes=edge) | LATER_STAGE
    with cpu_engine(poison=True):
        model, handle = rewritten(plain, config, PLANNED)
        zoo.train_step(model, LONGER)
        assert moved(handle, lambda: assert_same_step(plain, model, LONGER)) == planned_bytes("llama", config, LONGER)


def test_forty_lengths_are_exact_and_take_no_more_memory(monkeypatch):
    """Fault: something is kept for every shape: host memory, tables, slots."""
    monkeypatch.setattr(CpuBackend, "slab_bytes", 1 << 12)
    plain = zoo.ZOO["llama"](num_hidden_layers=2)
    config = offload(*ASKED, fraction=0.5) | recompute("layernorm")
    with cpu_engine(poison=True) as engine:
        model, handle = rewritten(plain, config, PLANNED)
        peak, first = 0, {}
        for length in [*range(3, 43), *range(3, 43, 6)]:
            engine.pool.reset_stats()
            bytes_moved = moved(handle, lambda length=length: assert_same_step(plain, model, words(length)))
            assert bytes_moved == first.setdefault(length, bytes_moved)
            peak = max(peak, engine.pool.peak_bytes)
            assert_empty(engine)
        assert engine.pool.held_bytes <= 3 * peak
        zoo.train_step(model, words(12))
        assert moved(handle, lambda: zoo.train_step(model, words(12))) == planned_bytes(
            "llama", config, words(12), num_layers=2
        )


def test_lengths_in_turn_within_a_step():
    """Microbatches of several lengths before the first backward: each follows its own decision."""
    plain = zoo.ZOO["llama"](num_hidden_layers=3)
    config = CONFIGS["margin"]
    lengths = (12, 20, 7, 20, 12)
    with cpu_engine(poison=True):
        model, handle = rewritten(plain, config, PLANNED)
        for step in range(3):
            before = handle.stats().copied_out_bytes
            for one in (plain, model):
                one.zero_grad()
                losses = [one(**words(length)).loss for length in lengths]
                for number in (3, 0, 4, 1, 2):
                    losses[number].backward()
            for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad), name
            del losses
            copied = handle.stats().copied_out_bytes - before
            if step:
                assert copied == sum(planned_bytes("llama", config, words(length)) for length in lengths)


class ViewOfShared(nn.Module):
    """Saves a small view of a tensor that all layers are given."""

    def __init__(self, stop=4):
        super().__init__()
        self.mlp = nn.Linear(WIDTH, WIDTH)
        self.stop = stop

    def forward(self, x, table):
        return self.mlp(x) + Product.apply(x, table[: self.stop])


@pytest.mark.parametrize("num_tables", [1, 4, 16])
def test_a_view_that_all_layers_gather_moves_once(num_tables):
    """Fault: a gathered view was copied by every layer, where the plan counts it once."""
    plain = Stack(ViewOfShared)
    x, table = hidden(), torch.randn(4 * num_tables, 16, WIDTH)
    config = offload("module:layers.*")
    with cpu_engine(poison=True) as engine:
        model = copy.deepcopy(plain)
        handle = memopt.apply(model, memopt.plan(memopt.analyze(plain, (x, table)), **config))
        planned = account(handle.plan)
        assert planned.offload.duplicate_bytes == 4 * 16 * WIDTH * 4
        for _ in range(3):
            before = handle.stats()
            for one in (plain, model):
                one.zero_grad()
                one(x, table).sum().backward()
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad)
            after = handle.stats()
            assert after.copied_out_bytes - before.copied_out_bytes == planned.swap_bytes
            assert after.copied_out_tensors - before.copied_out_tensors == planned.num_tensors
            assert after.copied_in_bytes == after.copied_out_bytes
            assert_empty(engine)
