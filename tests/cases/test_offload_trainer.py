"""The stock Trainer with regions offloaded and parts recomputed: the same losses and weights, bit for bit."""

import pytest

import memopt
from memopt.errors import IncompatibleError
from memopt.ir import account
from tests.cases.rewriting import batch, small_llama, stats_of
from tests.cases.test_checkpoint_trainer import ACCUMULATED, STEPS, assert_fits_alike, fitted

CONFIG = {
    "activation_offload": {
        "modules": ["core_attn", "attn_proj", "mlp_fc1"], "min_tensor_elements": 1, "margin": 0, "max_inflight": 2,
    },
    "recompute": {"modules": ["layernorm", "mlp_act"]},
}  # fmt: skip


@pytest.mark.parametrize("when", ["before", "first forward"])
def test_it_trains_as_without(when, tmp_path):
    model = small_llama(attention_dropout=0.1)
    handle = memopt.apply(model, CONFIG, batch(9) if when == "before" else None)
    assert_fits_alike(model, tmp_path)
    stats, totals = stats_of(model), account(handle.plan)
    calls = STEPS * ACCUMULATED
    assert stats.copied_out_bytes == calls * totals.swap_bytes > 0
    assert stats.replayed_calls == calls * sum(recipe.num_calls for recipe in totals.offload.recipes) > 0


def test_checkpointing_of_the_trainer_is_refused_where_it_is_on_first(tmp_path):
    model = small_llama()
    memopt.apply(model, CONFIG)
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    with pytest.raises(IncompatibleError, match="gradient_checkpointing"):
        fitted(model, tmp_path, **options)
