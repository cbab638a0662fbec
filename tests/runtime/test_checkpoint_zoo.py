"""Every model of the zoo trains alike when its layers are checkpointed through the public API, and when that is undone."""

import functools

import pytest
import torch
import transformers

import memopt
from memopt.runtime.rewrite import is_rewritten
from tests import zoo
from tests.runtime.checkpoints import MODES, calls, plan_of

POSITIONS = torch.arange(zoo.SEQ_LENGTH).expand(3, zoo.BATCH_SIZE, -1)
TRACED_WITH = {
    "wav2vec2_conformer": lambda batch: {key: value for key, value in batch.items() if key != "labels"},
    "qwen2_5_vl": lambda batch: batch | {"position_ids": POSITIONS},
}
"""What models are traced with that ask for the values of tensors when they are trained: the layers are the same."""
TAKE_NO_EMBEDDINGS = {
    "gemma3n", "gemma4", "t5", "bart", "whisper", "llava", "wav2vec2_conformer", "qwen2_5_vl",
}  # fmt: skip
"""Models that want more than embeddings where they are given those."""


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


@functools.cache
def graph_of(name):
    # A cache changes no value, but strides and with them roundings; a checkpointed layer does without.
    inputs = zoo.batch(name, use_cache=False)
    return memopt.analyze(zoo.ZOO[name](), TRACED_WITH.get(name, dict)(inputs))


def plain_and_checkpointed(name, mode):
    plain, model = zoo.ZOO[name](), zoo.ZOO[name]()
    return plain, model, memopt.apply(model, plan_of(graph_of(name), mode))


def assert_alike(plain, model, name, seed):
    inputs = zoo.batch(name, use_cache=False)
    assert zoo.differing(zoo.train_step(plain, inputs, seed), zoo.train_step(model, inputs, seed)) == []


def any_grad(module):
    """Return whether a backward came by: not at the last layer of a tower, where an earlier one is what counts."""
    return any(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("name", zoo.ZOO)
def test_training_is_the_same_bit_for_bit_and_after_undo(name, mode):
    plain, model = zoo.ZOO[name](), zoo.ZOO[name]()
    classes = [type(m) for m in model.modules()]
    handle = memopt.apply(model, plan_of(graph_of(name), mode))
    num_regions = len(handle.plan.decisions)
    assert sum(map(is_rewritten, model.modules())) == num_regions > 0
    for seed in range(2):
        assert_alike(plain, model, name, seed)
    stats = handle.stats()
    unused = [key for key in handle.plan.decisions if not any_grad(plain.get_submodule(key.fqn))]
    assert stats.checkpointed_calls == 2 * num_regions
    assert stats.replayed_calls == 2 * (num_regions - len(unused)) > 0
    assert (stats.kept_results_bytes > 0) == (mode == "selective")
    assert stats.registered_tensors == 0, "nothing is swapped"
    handle.undo()
    assert [type(m) for m in model.modules()] == classes
    assert [m.__dict__.keys() for m in model.modules()] == [m.__dict__.keys() for m in plain.modules()]
    assert_alike(plain, model, name, seed=2)
    assert handle.stats() == stats


def embedded_step(model, name):
    """Return the loss and all gradients of a step on embeddings that need a gradient."""
    inputs = zoo.batch(name, use_cache=False)
    vectors = model.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()
    model.zero_grad()
    transformers.set_seed(0)
    loss = model(inputs_embeds=vectors, **inputs).loss
    loss.backward()
    grads = {key: p.grad for key, p in model.named_parameters()}
    return {"loss": loss.detach(), "input": vectors.grad} | grads


@pytest.mark.parametrize("name", [name for name in zoo.ZOO if name not in TAKE_NO_EMBEDDINGS])
def test_gradients_by_the_input_are_the_same(name, mode):
    plain, model, handle = plain_and_checkpointed(name, mode)
    want = embedded_step(plain, name)
    assert want["input"].abs().sum() > 0
    assert zoo.differing(want, embedded_step(model, name)) == []
    assert calls(handle) == (len(handle.plan.decisions),) * 2


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "bert"])
def test_frozen_weights_below_inputs_that_need_a_gradient(name, mode):
    """As an adapter before the model, or a prompt, is trained."""
    plain, model, handle = plain_and_checkpointed(name, mode)
    plain.requires_grad_(False), model.requires_grad_(False)
    assert zoo.differing(embedded_step(plain, name), embedded_step(model, name)) == []
    assert calls(handle) == (len(handle.plan.decisions),) * 2


def test_a_configuration_does_as_a_plan_does(mode):
    plain, planned, _ = plain_and_checkpointed("qwen3_moe", mode)
    inputs = zoo.batch("qwen3_moe", use_cache=False)
    for options in ({}, {"inputs": inputs}):
        model = zoo.ZOO["qwen3_moe"]()
        other = memopt.apply(model, {"activation_checkpoint": mode}, **options)
        want = zoo.train_step(plain, inputs)
        assert zoo.differing(want, zoo.train_step(model, inputs)) == []
        assert calls(other) == (2, 2)
        other.undo()
        assert not any(map(is_rewritten, model.modules()))
    assert torch.equal(want["loss"], zoo.train_step(planned, inputs)["loss"])
