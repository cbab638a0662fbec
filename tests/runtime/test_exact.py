"""Loss and every gradient of a rewritten model equal the unwrapped model's, bit for bit."""

import gc

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import NoSelfAttentionError
from memopt.ir import account, policy
from memopt.runtime import finish_copies
from memopt.runtime.engine import engine_of
from tests import models
from tests.runtime.steps import SWAP, assert_equal_gradients, assert_equal_steps, step


@pytest.mark.parametrize("options", [{}, {"attn_implementation": "eager"}], ids=["sdpa", "eager"])
@pytest.mark.parametrize("build", [models.qwen3_moe, models.llama])
def test_gradients_are_equal_and_the_counters_are_what_the_plan_says(build, options):
    plain, rewritten, inputs = build(**options), build(**options), models.batch()
    plan = memopt.plan(memopt.analyze(rewritten, inputs), **SWAP)
    handle = memopt.apply(rewritten, plan)
    assert_equal_steps(plain, rewritten, inputs)
    predicted, stats = account(plan), handle.stats()
    assert all(target.num_covered >= 4 for target in predicted.targets)
    assert predicted.swap_bytes > 0
    assert stats.registered_tensors == stats.copied_out_tensors == 2 * predicted.num_tensors
    assert stats.registered_bytes == stats.copied_out_bytes == 2 * predicted.swap_bytes
    assert stats.copied_in_tensors == stats.copied_out_tensors


def test_attention_shared_by_two_blocks():
    plain, rewritten, inputs = models.SharedAttention(), models.SharedAttention(), models.hidden()
    plan = memopt.plan(memopt.analyze(rewritten, inputs), **SWAP)
    handle = memopt.apply(rewritten, plan)
    assert rewritten.blocks[0].self_attn is rewritten.blocks[2].self_attn
    assert_equal_steps(plain, rewritten, inputs)
    assert handle.stats().copied_out_bytes == 2 * account(plan).swap_bytes > 0


def test_a_self_attn_inside_a_self_attn_belongs_to_the_outer_one():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn = models.Attention()
            self.gate = nn.Linear(256, 256)

        def forward(self, x):
            return self.self_attn(x) * self.gate(x).sigmoid()

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.Sequential(models.Block(Outer()), models.Block(Outer()))

        def forward(self, x):
            return self.blocks(x).square().mean()

    plain, rewritten = Nested(), Nested()
    plan = memopt.plan(memopt.analyze(rewritten, models.hidden()), **SWAP)
    assert [str(key) for key in plan.decisions] == ["blocks.0.self_attn", "blocks.1.self_attn"]
    handle = memopt.apply(rewritten, plan)
    assert "[" not in rewritten.blocks[0].self_attn.self_attn._get_name()
    assert_equal_steps(plain, rewritten, models.hidden())
    assert handle.stats().copied_out_bytes == 2 * account(plan).swap_bytes > 0


def test_a_model_without_self_attn_is_refused_in_the_words_of_the_rfc():
    with pytest.raises(NoSelfAttentionError) as caught:
        memopt.apply(models.gpt2(), SWAP, models.batch(seq_length=8))
    assert str(caught.value) == (
        "activation_swap='attention' found no self_attn modules in GPT2LMHeadModel; "
        "expected attention modules registered as self_attn"
    )


@pytest.mark.parametrize("more", [{"attention_dropout": 0.2}, {}])
def test_dropout_and_padding(more):
    plain, rewritten, inputs = models.llama(**more), models.llama(**more), models.batch()
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][0, :40] = 0
    memopt.apply(rewritten, SWAP, inputs)
    for seed in range(2):
        torch.manual_seed(seed)
        loss, grads = step(plain, inputs)
        torch.manual_seed(seed)
        other_loss, other_grads = step(rewritten, inputs)
        assert torch.equal(loss, other_loss)
        assert_equal_gradients(grads, other_grads)


def test_weights_are_never_moved_also_not_their_casts():
    model, inputs = models.llama(hidden_size=1024, head_dim=256), models.batch(seq_length=256)
    plan = memopt.plan(memopt.analyze(model, inputs, autocast="bfloat16", target_device="cpu"), **SWAP)
    reasons = dict(account(plan).targets[0].kept)
    assert reasons["parameter cast"] >= 1 << 20
    handle = memopt.apply(model, plan)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**inputs).loss
    loss.backward()
    assert handle.stats().copied_out_bytes == account(plan).swap_bytes > 0


def test_norms_and_mlp_have_no_part_in_it():
    model, inputs = models.qwen3_moe(), models.batch()
    handle = memopt.apply(model, SWAP, inputs)
    rewritten = {fqn for fqn, module in model.named_modules() if "[" in module._get_name()}
    assert rewritten == {f"model.layers.{n}.self_attn" for n in range(3)}
    step(model, inputs)
    assert handle.stats().copied_out_tensors == account(handle.plan).num_tensors


def test_200_steps_without_growth(monkeypatch):
    torch.manual_seed(0)
    model = models.SharedAttention()
    inputs = models.hidden(seq_length=32)
    monkeypatch.setattr(policy, "MIN_SWAP_TENSOR_BYTES", inputs.nbytes)  # as if these were large tensors
    handle = memopt.apply(model, SWAP, inputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    counts = []
    for number in range(200):
        optimizer.zero_grad()
        model(inputs).backward()
        optimizer.step()
        if number in (20, 199):
            finish_copies(model)
            gc.collect()
            live = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
            pool = engine_of(torch.device("cpu")).pool
            counts.append((live, pool.held_bytes, pool.in_use_bytes))
    (live, held, _), (later_live, later_held, in_use) = counts
    assert later_live < live + 20  # a leak is one a step; the thread that copies may hold its last ones still
    assert later_held == held
    assert in_use == 0
    assert handle.stats().copied_out_tensors > 200


def test_swap_none_changes_nothing():
    model = models.llama()
    classes = [type(m) for m in model.modules()]
    handle = memopt.apply(model, {"activation_swap": "none"}, models.batch(seq_length=8))
    assert [type(m) for m in model.modules()] == classes
    assert not any(isinstance(m, nn.Module) and m._forward_hooks for m in model.modules())
    assert handle.stats().registered_tensors == 0
