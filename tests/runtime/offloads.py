"""Models with named parts offloaded and recomputed, made through the public API, and what they must not differ in."""

import copy
import gc

import torch

import memopt
from memopt.ir import account
from memopt.runtime import finish_copies
from tests import zoo
from tests.runtime.steps import assert_equal_gradients, gradients

PARADIGM = {
    "activation_offload": {"modules": "core_attn,attn_proj,expert_fc1", "min_tensor_elements": 1, "margin": 0},
    "recompute": {"modules": "layernorm,moe_act"},
}


def offload(*modules, **settings):
    """Return a configuration that offloads some regions, however small their tensors, the last layer's too."""
    return {"activation_offload": {"modules": list(modules), "min_tensor_elements": 1, "margin": 0} | settings}


def recompute(*modules):
    return {"recompute": {"modules": list(modules)}}


def rewritten(plain, config, inputs, graph=None):
    """Return a rewritten copy of a model, and the handle; planned for these inputs, or by the graph made of them."""
    model = copy.deepcopy(plain)
    return model, memopt.apply(model, memopt.plan(graph or memopt.analyze(plain, inputs), **config))


def assert_exact(plain, model, inputs, steps=2):
    for seed in range(steps):
        one, other = (zoo.train_step(m, inputs, seed) for m in (plain, model))
        assert not zoo.differing(one, other)
    finish_copies(model)


def assert_as_planned(handle, model, inputs):
    """One step copies exactly what the plan's account says."""
    before = handle.stats()
    zoo.train_step(model, inputs)
    after, totals = handle.stats(), account(handle.plan)
    assert after.copied_out_bytes - before.copied_out_bytes == totals.swap_bytes
    assert after.copied_out_tensors - before.copied_out_tensors == totals.num_tensors


def held_after_forward(model, inputs):
    """Return the bytes of all storages that a forward makes and that are there when it has ended, copies done."""
    from tests.runtime.test_checkpoint_memory import Bytes

    zoo.train_step(model, inputs)  # what is made once, as the pool's slabs, is no matter of a step
    gc.collect()
    with Bytes() as census:
        loss = model(**inputs).loss
        finish_copies(model)
        held = census.live_bytes()
    loss.backward()
    return held


def forward_backward(model, inputs):
    model.zero_grad()
    loss = model(inputs) if isinstance(inputs, torch.Tensor) else model(**inputs).loss
    loss.sum().backward()
    return loss.detach(), gradients(model)


def assert_same_step(plain, model, inputs):
    (loss, grads), (other_loss, other_grads) = forward_backward(plain, inputs), forward_backward(model, inputs)
    assert torch.equal(loss, other_loss)
    assert_equal_gradients(grads, other_grads)
