"""What torch's own selective checkpoint does where a saved tensor is written to, as of torch 2.13.

These tests hold torch to nothing that it promises, and memopt to nothing at all: they show that the faults are real
which memopt's own selective recomputation guards against, and on which models of the zoo. A later torch that does
better skips them. The policy is the one that NVIDIA-NeMo/Automodel and pytorch/torchtitan put on whole layers: of
every two matrix products save the first, save every attention, recompute the rest.

Torch keeps the output of a saved operation and gives it out again in the recomputation, where the layer writes to it
a second time. The version counter should tell; but `aten::_unsafe_view`, by which a Linear without bias returns a
product of three dimensions and any other matmul one of four, has a counter of its own.
"""

import itertools
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
    set_checkpoint_early_stop,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from tests import zoo

PRODUCTS = {"aten::mm", "aten::_grouped_mm", "transformers::grouped_mm_fallback"}
SAVED = {"aten::bmm", "aten::addmm", "aten::_scaled_dot_product_flash_attention_for_cpu"}
TOPK = {"aten::topk"}

MUTATED = "Tensor cached during selective activation checkpoint has been mutated"


def saving(saved=SAVED, alternating=PRODUCTS):
    """Return what makes the contexts of one call of a layer; of the alternating operations the first is saved."""

    def contexts():
        nth = itertools.count()

        def policy(_context, operation, *_args, **_options):
            name = operation.name()
            save = name in saved or (name in alternating and next(nth) % 2 == 0)
            return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return contexts


def checkpointed(layer, contexts):
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)
    return layer


def plain_and_checkpointed(name, contexts):
    """Return one step of a model as it is, and one with all its layers checkpointed."""
    plain, model, inputs = zoo.ZOO[name](), zoo.ZOO[name](), zoo.batch(name, use_cache=False)
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            checkpointed(layer, contexts)
    return zoo.train_step(plain, inputs), zoo.train_step(model, inputs)


def assert_exact(name, contexts):
    assert zoo.differing(*plain_and_checkpointed(name, contexts)) == []


@contextmanager
def raises_for_mutation():
    """Torch notices that a saved tensor was written to; a later one may be right instead, which the block asserts."""
    try:
        yield
    except RuntimeError as error:
        assert MUTATED in str(error)
    else:
        skip_if_mended()
        pytest.fail("torch did not raise")


@contextmanager
def noticing_nothing():
    """A later torch may well raise where this one is silent."""
    try:
        yield
    except RuntimeError:
        skip_if_mended()
        raise


def skip_if_mended():
    if torch.__version__ >= (2, 14):
        pytest.skip("torch has mended it")


LAYERS = {"gemma3n": "model.layers.{}.", "big_bird": "bert.encoder.layer.{}."}
"""Models that write to a product which is viewed, and the names of their layers."""

WRITES_TO_TOPK = ["mixtral", "qwen3_moe", "qwen3_next", "qwen3_5_moe"]


@pytest.mark.parametrize("name", [*LAYERS, *WRITES_TO_TOPK, "gpt_oss", "llama4"])
def test_saving_nothing_is_exact(name):
    """So the faults below are the policy's, not those of checkpointing these models' layers."""
    assert_exact(name, noop_context_fn)


@pytest.mark.parametrize("name", LAYERS)
def test_the_loss_is_right_and_gradients_of_every_layer_are_wrong(name):
    """AltUp of Gemma3n adds to its predictions in place, and sparse attention of BigBird to its context."""
    with noticing_nothing():
        plain, selective = plain_and_checkpointed(name, saving())
    differing = zoo.differing(plain, selective)
    if not differing:
        skip_if_mended()
    assert "loss" not in differing
    for n in range(zoo.ZOO[name].keywords["num_hidden_layers"]):
        of_layer = [key for key in differing if key.startswith(LAYERS[name].format(n))]
        assert max(relative_error(plain[key], selective[key]) for key in of_layer) > 0.1  # no rounding


def relative_error(want, got):
    return (got - want).norm() / want.norm()


def test_gpt_oss_raises():
    """The experts' bias is added in place to the product of a grouped matmul."""
    with raises_for_mutation():
        assert_exact("gpt_oss", saving())


@pytest.mark.parametrize("name", WRITES_TO_TOPK)
def test_saving_topk_raises_where_a_router_normalizes_in_place(name):
    with raises_for_mutation():
        assert_exact(name, saving(SAVED | TOPK))


@pytest.mark.parametrize("name", WRITES_TO_TOPK)
def test_recomputing_topk_is_exact_there(name):
    assert_exact(name, saving())


def test_llama4_raises_only_if_the_recomputation_runs_to_its_end():
    """The routed experts are added in place to the shared one's last product, which stopping early never asks for."""
    every_product = saving(SAVED | PRODUCTS)
    assert_exact("llama4", every_product)
    with set_checkpoint_early_stop(False), raises_for_mutation():
        assert_exact("llama4", every_product)


class AddsInPlace(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=bias)

    def forward(self, x):
        y = self.linear(x)
        y += x
        return y * y.tanh()


def gradients(layer, x):
    """Return the gradients by the input and the weights, random numbers in the layer coming from one seed."""
    torch.manual_seed(1)
    return torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])


def equal(one, other):
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(4, 8), (2, 4, 8)])
def test_only_a_linear_without_bias_in_three_dimensions_escapes_the_version_counter(shape, bias):
    torch.manual_seed(0)
    layer, x = AddsInPlace(bias), torch.randn(shape, requires_grad=True)
    plain = gradients(layer, x)
    checkpointed(layer, saving())
    if bias or len(shape) < 3:
        with raises_for_mutation():
            assert equal(plain, gradients(layer, x))
        return
    with noticing_nothing():
        selective = gradients(layer, x)
    if equal(plain, selective):
        skip_if_mended()
    assert not equal(plain, selective)


class DrawsTwice(nn.Module):
    def forward(self, x):
        return x * torch.rand_like(x) * torch.rand_like(x)


def test_a_saved_draw_leaves_the_generator_behind():
    """It is not repeated, so the next one takes its numbers: as a dropout would after a saved attention with dropout."""
    layer, x = DrawsTwice(), torch.ones(8, requires_grad=True)
    plain = gradients(layer, x)
    assert equal(plain, gradients(checkpointed(DrawsTwice(), noop_context_fn), x))
    with noticing_nothing():
        selective = gradients(checkpointed(DrawsTwice(), saving(alternating={"aten::rand_like"})), x)
    if equal(plain, selective):
        skip_if_mended()
    assert not equal(plain, selective)


def test_batch_norm_counts_the_recomputation_too():
    """Of the plain checkpoint also: every buffer that a layer writes to is written to twice."""
    plain, full = plain_and_checkpointed("wav2vec2_conformer", noop_context_fn)
    differing = zoo.differing(plain, full)
    if not differing:
        skip_if_mended()
    written = {key for key in plain if ".batch_norm.running_" in key or key.endswith(".num_batches_tracked")}
    assert set(differing) == written
    assert {full[key].item() for key in written if key.endswith(".num_batches_tracked")} == {2}
