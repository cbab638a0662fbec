"""Regions of layers, swapped each alone and together with recomputed parts: exact, and as the plan says to the byte."""

import copy
import functools

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import memopt
from memopt.ir import account
from memopt.ir.regions import REGIONS
from tests import zoo
from tests.runtime.engines import cpu_engine
from tests.runtime.offloads import (
    PARADIGM,
    assert_as_planned,
    assert_exact,
    held_after_forward,
    offload,
    recompute,
    rewritten,
)

MODELS = ("llama", "qwen3", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
"""Dense, MoE, and latent attention with dense and MoE layers mixed."""
ABSENT = {
    "llama": ("qk_norm", "router", "expert_fc1", "moe_act", "moe_fc2", "shared_expert"),
    "qwen3": ("router", "expert_fc1", "moe_act", "moe_fc2", "shared_expert"),
    "qwen3_moe": ("mlp_fc1", "mlp_act", "mlp_fc2", "shared_expert"),
    "mixtral": ("qk_norm", "mlp_fc1", "mlp_act", "mlp_fc2", "shared_expert"),
    "gpt_oss": ("qk_norm", "mlp_fc1", "mlp_act", "mlp_fc2", "shared_expert"),
    "deepseek_v3": (),
}
PRESENT = [(model, name) for model in MODELS for name in REGIONS if name not in ABSENT[model]]


@functools.cache
def graph_of(name, autocast="none"):
    """Return the graph of a model, which is the same for all that is asked of it."""
    return memopt.analyze(zoo.ZOO[name](), zoo.batch(name), autocast=autocast)


def asked(region):
    return ("core_attn", "attn_proj") if region == "attn_proj" else (region,)


@pytest.mark.parametrize("name", MODELS)
def test_the_regions_of_a_model_are_those_that_it_has(name):
    found = memopt.regions(graph_of(name))
    assert set(REGIONS) - set(found) == set(ABSENT[name])


@pytest.mark.parametrize(("name", "region"), PRESENT)
def test_each_region_alone_is_exact_and_moves_what_is_planned(name, region):
    plain, inputs = zoo.ZOO[name](), zoo.batch(name)
    with cpu_engine(poison=True):
        model, handle = rewritten(plain, offload(*asked(region)), inputs, graph_of(name))
        assert account(handle.plan).swap_bytes > 0
        assert_as_planned(handle, model, inputs)
        assert_exact(plain, model, inputs)
        assert_as_planned(handle, model, inputs)


@pytest.mark.parametrize("name", MODELS)
def test_the_paradigm_is_exact_and_moves_what_is_planned(name):
    plain, inputs = zoo.ZOO[name](), zoo.batch(name)
    with cpu_engine(poison=True):
        model, handle = rewritten(plain, PARADIGM, inputs, graph_of(name))
        assert_as_planned(handle, model, inputs)
        assert_exact(plain, model, inputs)
        assert_as_planned(handle, model, inputs)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "config",
    [
        offload("core_attn", "attn_proj"),
        offload(*REGIONS),
        offload("attn_norm", "mlp_norm", "qkv_linear"),
        recompute("layernorm"),
        recompute("moe_act", "mlp_act"),
        recompute("layernorm", "moe_act", "mlp_act"),
        PARADIGM,
        offload(*REGIONS) | recompute("layernorm", "moe_act", "mlp_act"),
        offload("module:model.layers.*"),
        offload("module:*.self_attn", "module:model.norm"),
        offload("core_attn", "attn_proj", fraction=0.5),
        offload("core_attn", "attn_proj", "mlp_norm", margin="auto"),
    ],
    ids=lambda config: "-".join(str(v["modules"]) for v in config.values())[:60],
)
def test_what_is_held_between_forward_and_backward_is_what_the_plan_says(name, config):
    plain, inputs = zoo.ZOO[name](), zoo.batch(name)
    with cpu_engine():
        model, handle = rewritten(plain, config, inputs, graph_of(name))
        freed = held_after_forward(plain, inputs) - held_after_forward(model, inputs)
        assert freed == account(handle.plan).net_freed_bytes
        assert_exact(plain, model, inputs)
        assert_as_planned(handle, model, inputs)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("more", [(), ("layernorm", "moe_act", "mlp_act")], ids=["offload", "recompute too"])
def test_under_autocast_too_what_is_held_is_what_the_plan_says(name, more):
    plain, inputs = zoo.ZOO[name](), zoo.batch(name)
    graph = graph_of(name, autocast="bfloat16")
    with cpu_engine(), torch.autocast("cpu", torch.bfloat16):
        model = copy.deepcopy(plain)
        handle = memopt.apply(
            model, memopt.plan(graph, **offload(*memopt.regions(graph)), **(recompute(*more) if more else {}))
        )
        freed = held_after_forward(plain, inputs) - held_after_forward(model, inputs)
        assert freed == account(handle.plan).net_freed_bytes
        assert_exact(plain, model, inputs)
        assert_as_planned(handle, model, inputs)


@pytest.mark.parametrize(("name", "whole"), [("llama", "mlp"), ("qwen3_moe", "moe"), ("deepseek_v3", "shared_expert")])
@pytest.mark.parametrize("pattern", ["module:model.layers.*", "module:model.layers.*.mlp"])
def test_what_a_module_is_called_with_that_runs_again_as_a_whole_moves_too(name, whole, pattern):
    plain, inputs = zoo.ZOO[name](), zoo.batch(name)
    modules = [pattern] if pattern.endswith("layers.*") else [pattern, "core_attn"]
    with cpu_engine():
        model, handle = rewritten(plain, offload(*modules) | recompute(whole), inputs, graph_of(name))
        freed = held_after_forward(plain, inputs) - held_after_forward(model, inputs)
        assert freed == account(handle.plan).net_freed_bytes
        assert_exact(plain, model, inputs)
        assert_as_planned(handle, model, inputs)


def test_a_graph_that_is_dropped_again_takes_no_part_along(monkeypatch):
    """What it saved is freed in the middle of the forward, and its storage's identity goes to the next that is made."""
    plain, inputs = zoo.ZOO["llama"](), zoo.batch("llama", use_cache=False)
    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def choosing_attention(module, query, key, value, *args, **kwargs):
        chosen = [(query * key.exp().mean()).exp().detach().argmax() for _ in range(8)]
        freed = [(query * 2.0).exp() for _ in range(8)]
        del chosen, freed
        return attention(module, query, key, value, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", choosing_attention)
    model, handle = rewritten(plain, offload("core_attn", "attn_proj"), inputs)
    for _ in range(3):
        assert_as_planned(handle, model, inputs)
    assert_exact(plain, model, inputs)
