"""apply(model, config) without inputs: on the first training forward, with what comes in there."""

import copy
import pickle

import pytest
import torch

import memopt
from memopt.errors import IncompatibleError, NoSelfAttentionError, RequestError
from memopt.ir import account
from tests import models
from tests.runtime.offloads import PARADIGM, offload, recompute
from tests.runtime.steps import SWAP, assert_equal_steps, step


def test_the_first_training_forward_is_rewritten_already():
    plain, model, inputs = models.llama(), models.llama(), models.batch()
    handle = memopt.apply(model, SWAP)
    assert handle.plan is None
    with torch.no_grad():
        model(**inputs)
    model.eval()(**inputs)
    model.train()
    assert handle.plan is None
    assert_equal_steps(plain, model, inputs)
    assert handle.stats().copied_out_bytes == 2 * account(handle.plan).swap_bytes > 0
    assert not model._forward_pre_hooks
    assert not model._forward_pre_hooks_with_kwargs


def test_dropout_draws_as_without_memopt():
    plain, model = (models.llama(attention_dropout=0.3) for _ in range(2))
    inputs = models.batch()
    memopt.apply(model, SWAP)
    torch.manual_seed(7)
    loss, _ = step(plain, inputs)
    torch.manual_seed(7)
    assert torch.equal(loss, step(model, inputs)[0])


def test_what_can_be_refused_at_once_is():
    with pytest.raises(NoSelfAttentionError):
        memopt.apply(models.gpt2(), SWAP)
    model = models.llama()
    model.gradient_checkpointing_enable()
    with pytest.raises(IncompatibleError):
        memopt.apply(model, SWAP)


def test_autocast_is_seen():
    model, inputs = models.llama(), models.batch()
    handle = memopt.apply(model, SWAP)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(**inputs).loss.backward()
    assert handle.plan.graph.input.autocast == "bfloat16"
    assert handle.stats().copied_out_bytes == account(handle.plan).swap_bytes


def test_undo_before_the_first_forward():
    model = models.llama()
    memopt.apply(model, SWAP)
    memopt.apply(model, SWAP)
    assert len(model._forward_pre_hooks) == 1
    memopt.undo(model)
    assert not model._forward_pre_hooks
    handle = memopt.apply(model, SWAP)
    handle.undo()
    assert not model._forward_pre_hooks
    assert_equal_steps(models.llama(), model, models.batch(), steps=1)


def test_copies_and_pickles_of_a_waiting_model_wait_too():
    model, inputs = models.llama(), models.batch()
    memopt.apply(model, SWAP)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_equal_steps(models.llama(), other, inputs, steps=1)
        assert "[attention swap]" in repr(other)
    assert "[attention swap]" not in repr(model)
    assert len(model._forward_pre_hooks) == 1


def test_offload_without_inputs():
    """As under Trainer: planned from the first training forward; the handle answers before and after it."""
    plain, model, inputs = models.qwen3_moe(), models.qwen3_moe(), models.batch(seq_length=64)
    handle = memopt.apply(model, PARADIGM)
    assert (handle.plan, handle.pool_stats(), handle.stats().copied_out_bytes) == (None, {}, 0)
    handle.reset_pool_stats()
    assert_equal_steps(plain, model, inputs)
    totals = account(handle.plan)
    assert handle.stats().copied_out_bytes == 2 * totals.swap_bytes > 0
    assert handle.stats().replayed_calls == 2 * sum(recipe.num_calls for recipe in totals.offload.recipes) > 0
    (pool,) = handle.pool_stats().values()
    assert pool.in_use_bytes == 0
    assert pool.peak_bytes >= totals.swap_bytes
    handle.reset_pool_stats()
    assert next(iter(handle.pool_stats().values())).peak_bytes == 0
    memopt.undo(model)
    assert type(model.model.layers[0]) is type(plain.model.layers[0])


def test_its_names_count_modules():
    """Several regions of a layer are one module."""
    handle = memopt.apply(models.llama(), offload("core_attn", "attn_proj", "mlp_fc1"), models.batch(seq_length=16))
    assert repr(handle) == "<Rewriting of 3 modules of LlamaForCausalLM>"


def test_what_is_marked_stays():
    model, inputs = models.llama(), models.batch(seq_length=64)
    handle = memopt.apply(model, offload("core_attn"), inputs)

    def copied():
        before = handle.stats().copied_out_bytes
        step(model, inputs)
        return handle.stats().copied_out_bytes - before

    plain = copied()
    marking = model.model.layers[0].self_attn.v_proj.register_forward_hook(
        lambda *args: memopt.mark_not_offload(args[2])
    )
    copied()  # the call that learns what becomes of each save
    assert copied() < plain
    marking.remove()
    assert copied() == plain


@pytest.mark.parametrize("config", [offload("expert_fc1"), offload("module:*.experts"), recompute("moe_act")])
def test_what_the_model_does_not_have_shows_in_the_first_forward(config):
    model, inputs = models.llama(), models.batch(seq_length=16)
    handle = memopt.apply(model, config)
    for _ in range(2):
        with pytest.raises(RequestError, match="the model waits for another forward until handle.undo()"):
            model(**inputs)
    handle.undo()
    model(**inputs)


@pytest.mark.parametrize("config", [offload("core_attn"), recompute("layernorm"), recompute("mlp")])
def test_checkpointing_of_transformers_is_named(config):
    """It was said that activation_swap excludes it, which nobody had asked for."""
    model, inputs = models.llama(), models.batch(seq_length=16)
    plan = memopt.plan(memopt.analyze(model, inputs), **config)
    model.gradient_checkpointing_enable()
    for what, given in ((config, None), (config, inputs), (plan, None)):
        with pytest.raises(IncompatibleError, match="call model.gradient_checkpointing_disable"):
            memopt.apply(model, what, given)
