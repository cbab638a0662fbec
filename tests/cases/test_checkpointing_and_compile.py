"""Other machinery on the same model: gradient checkpointing and graph compilers."""

import collections

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import GraphCompileError, IncompatibleError
from tests.cases.rewriting import (
    assert_at_work,
    assert_identical,
    assert_trains_alike,
    batch,
    loss_on,
    rewritten,
    small_llama,
    trained,
    twin,
)
from tests.runtime.engines import total_stats


def checkpointed_llama():
    model = small_llama(num_hidden_layers=3, attention_dropout=0.2)
    model.gradient_checkpointing_enable()
    return model


def count_runs(model):
    """Return a counter of how often each attention has run from now on."""
    runs = collections.Counter()
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda module, *_: runs.update([module]))
    return runs


def assert_runs_at_most_twice(plain, model):
    """Forward and one run in backward, no more; and right. The swap takes no part until checkpointing ends."""
    runs = count_runs(model)
    for seed in range(2):
        runs.clear()
        assert_identical(trained(plain, loss_on(batch()), seed), trained(model, loss_on(batch()), seed))
        assert len(runs) == 3
        assert max(runs.values()) <= 2
    assert total_stats(model).registered_tensors == 0
    for one in (plain, model):
        one.gradient_checkpointing_disable()
    assert_identical(trained(plain, loss_on(batch()), 0), trained(model, loss_on(batch()), 0))
    assert_at_work(model)


def test_blocks_that_are_checkpointed_already_are_refused():
    """Two schemes at once ran every layer three times (meta-llama/llama-cookbook#740)."""
    model = checkpointed_llama()
    with pytest.raises(IncompatibleError, match="activation checkpointing"):
        rewritten(model, "block")
    assert not any(hasattr(m, "_memopt_region") for m in model.modules())
    assert_trains_alike(small_llama(num_hidden_layers=3, attention_dropout=0.2), model, loss_on(batch()), steps=1)


def test_submodules_of_checkpointed_blocks_run_no_third_time():
    """As before (meta-llama/llama-cookbook#740), where the rewritten modules cannot know of it."""
    plain, model = small_llama(num_hidden_layers=3, attention_dropout=0.2), rewritten(checkpointed_llama(), "submodule")
    assert_runs_at_most_twice(plain, model)


def test_checkpointing_that_comes_after_the_rewriting(grain):
    """As before (meta-llama/llama-cookbook#740), in the other order."""
    plain = small_llama(num_hidden_layers=3, attention_dropout=0.2)
    model = twin(plain, grain)
    model.gradient_checkpointing_enable()
    assert_runs_at_most_twice(plain, model)


def test_a_compiler_is_refused_and_eager_goes_on(grain):
    """Compiled code ignored the hooks, or ran them too early (pytorch/pytorch#116221)."""
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    model, x = twin(plain, grain), torch.randn(4, 8)

    def loss_of(module):
        return module(x).square().mean()

    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        with pytest.raises(GraphCompileError, match="undo"):
            loss_of(compiled)
    assert_trains_alike(plain, model, loss_of)
    assert_at_work(model)
    memopt.undo(model)
    torch._dynamo.reset()
    want, got = trained(plain, loss_of), trained(compiled, loss_of)
    got = {name.removeprefix("_orig_mod."): tensor for name, tensor in got.items()}
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor)
