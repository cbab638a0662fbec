"""The runtime finds the same saves as the trace, by walking the graph, whatever changes their number and order."""

import pytest
import torch
from torch import nn

import memopt
from memopt.ir import Plan, account
from memopt.passes import AttentionSwap, Pipeline, PrefetchChain
from memopt.runtime.module_state import state_of
from memopt.runtime.settling import settle_copies
from tests import models
from tests.runtime.engines import cpu_engine
from tests.runtime.steps import SWAP, assert_equal_gradients, assert_equal_steps, step

LAYER = "model.layers.1.self_attn"


@pytest.fixture(autouse=True)
def poisoned():
    with cpu_engine(poison=True):
        yield


def learned_roles(model):
    (table,) = state_of(model.get_submodule(LAYER)).tables.values()
    return [(r.child, r.node, r.field, r.occurrence) for r in (entry.role for entry in table) if r]


def traced_roles(graph):
    saved = graph.saved_in(LAYER)
    return [(t.owner.removeprefix(LAYER).lstrip("."), t.node, t.field, t.occurrence) for t in saved]


def with_lora(model):
    from peft import LoraConfig, inject_adapter_in_model

    lora = LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[1], lora_dropout=0.1)
    return inject_adapter_in_model(lora, model)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("case", ["plain", "qwen3-moe", "dropout", "padded", "autocast", "lora", "frozen"])
def test_roles_are_those_of_the_trace(attn, case):
    build = models.qwen3_moe if case == "qwen3-moe" else models.llama
    model = build(num_hidden_layers=2, attn_implementation=attn, attention_dropout=0.1 if case == "dropout" else 0.0)
    model = with_lora(model) if case == "lora" else model
    if case == "frozen":
        model.get_submodule(LAYER).requires_grad_(False)
    inputs, autocast = models.batch(seq_length=64), "bfloat16" if case == "autocast" else "none"
    if case == "padded":
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][0, :9] = 0
    graph = memopt.analyze(model, inputs, autocast=autocast, target_device="cpu")
    memopt.apply(model, memopt.plan(graph, **SWAP))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case == "autocast"):
        loss = model(**inputs).loss
    assert learned_roles(model) == traced_roles(graph)
    assert len(set(learned_roles(model))) > 8
    loss.backward()


def test_what_was_learned_is_used_and_a_new_signature_is_learned_anew():
    plain, model = models.llama(), models.llama()
    memopt.apply(model, SWAP, models.batch())
    tables = state_of(model.get_submodule(LAYER)).tables
    assert_equal_steps(plain, model, models.batch())
    assert len(tables) == 1
    assert_equal_steps(plain, model, models.batch(seq_length=500))
    assert len(tables) == 2
    before = len(next(iter(tables.values())))
    for one in (plain, model):
        one.model.layers[1].self_attn.requires_grad_(False)
    for _ in range(3):
        (loss, grads), (other_loss, other_grads) = step(plain, models.batch()), step(model, models.batch())
        assert torch.equal(loss, other_loss)
        assert_equal_gradients(grads, other_grads)
    assert len(list(tables.values())[-1]) < before, "what is saved for frozen weights is less; that was learned anew"


def test_what_was_learned_and_counted_for_one_plan_is_not_used_for_the_next():
    model, inputs = models.llama(num_hidden_layers=2), models.batch()
    graph = memopt.analyze(model, inputs)
    for margin_bytes in (0, 1 << 40, 0):
        plan = Pipeline([AttentionSwap(margin_bytes=margin_bytes), PrefetchChain()]).run(Plan(graph=graph))
        handle = memopt.apply(model, plan)
        assert handle.stats().registered_tensors == 0
        for _ in range(2):
            step(model, inputs)
        assert handle.stats().copied_out_bytes == 2 * account(plan).swap_bytes
        handle.undo()


def test_a_forward_that_takes_another_way_is_noticed_and_stays_exact():
    class Branching(models.Attention):
        way = 0

        def forward(self, x):
            y = super().forward(x)
            return y.sigmoid() if self.way else y.tanh() * y

    results = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = Branching()
        if wrapped:
            memopt.swap_wrapper(model)
        for way in (0, 1, 1, 0, 0):
            model.way = way
            model(models.hidden()).sum().backward()
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert state_of(model).counters.copied_out_tensors > 0


def test_learning_leaves_no_hook_and_reads_no_value():
    model = models.llama()
    memopt.apply(model, SWAP, models.batch())
    handle = memopt.apply(model, memopt.plan(memopt.analyze(model, models.batch()), **SWAP))
    loss = model(**models.batch()).loss
    assert {*model._forward_hooks.values()} == {settle_copies}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules() if m is not model)
    assert handle.stats().copied_in_tensors == 0
    loss.backward()


def test_the_number_of_remembered_signatures_is_bounded():
    attention = memopt.swap_wrapper(models.Attention())
    for length in range(2, 60):
        attention(models.hidden(batch_size=1, seq_length=length))
    assert len(state_of(attention).tables) == 32


class Sigmoids(nn.Module):
    """Attention of which a region's signature says nothing: its input is in a dict."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, inputs):
        return self.second(self.first(inputs["x"]).sigmoid())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = Sigmoids()

    def forward(self, x):
        return self.self_attn({"x": x}).sum()


@pytest.mark.parametrize("first", ["small", "without grad", "part of a storage"])
def test_what_stayed_in_the_call_that_learned_is_swapped_once_it_may_be(first, monkeypatch):
    monkeypatch.setattr("memopt.ir.policy.MIN_SWAP_TENSOR_BYTES", 1 << 14)
    large = torch.randn(4096, 64, requires_grad=True)
    begins = {
        "small": torch.randn(4, 64, requires_grad=True),
        "without grad": large.detach(),
        "part of a storage": torch.randn(2, 4096, 64, requires_grad=True)[0],
    }
    counts = []
    for inputs in (begins[first], large):
        model = Model()
        plan = Pipeline([AttentionSwap(margin_bytes=0), PrefetchChain()]).run(
            Plan(graph=memopt.analyze(model, {"x": large}))
        )
        handle = memopt.apply(model, plan)
        model(inputs).backward()
        before = handle.stats().copied_out_tensors
        model(large).backward()
        counts.append(handle.stats().copied_out_tensors - before)
    assert counts[0] == counts[1] > 0
