"""Which regions a decision may name, and which decisions a plan may hold together."""

import pytest

from memopt.errors import InvalidPlanError
from memopt.ir import Action, Decision, Offload, Plan, RegionKey, plan_from_json, plan_to_json
from tests.builders import graph_of, moe_layers

LAYER = "model.layers.0"


def decision(action="swap", policy="offload", route=""):
    return Decision(action=Action(action), by="hand", why="why not", policy=policy, route=route)


SWAP, KEEP = decision(), decision("keep")
RECIPE, WHOLE = decision("recompute", "full", "recipe"), decision("recompute", "full", "submodule")
ATTENTION = decision(policy="attention")


def plan_of(decisions, **options):
    saves, build = moe_layers(2)
    keys = {RegionKey(*(key if isinstance(key, tuple) else (key, ""))): one for key, one in decisions.items()}
    return Plan(graph=graph_of(*saves, build=build), decisions=keys, **options)


@pytest.mark.parametrize(
    "decisions",
    [
        {(LAYER, "core_attn"): SWAP, (LAYER, "attn_proj"): KEEP, ("model.layers.1", "core_attn"): SWAP},
        {(LAYER, "fused_group_mlp"): SWAP, (LAYER, "module:self_attn"): SWAP},
        {(LAYER, "core_attn"): SWAP, f"{LAYER}.input_layernorm": RECIPE, (f"{LAYER}.mlp.experts", "moe_act"): RECIPE},
        {(LAYER, "core_attn"): SWAP, f"{LAYER}.mlp": WHOLE},
        {(f"{LAYER}.mlp", "module:"): SWAP, f"{LAYER}.self_attn": ATTENTION},
        {("model", "module:"): SWAP, f"{LAYER}.input_layernorm": RECIPE},
        {("", "module:"): SWAP},
    ],
)
def test_what_is_legal(decisions):
    plan = plan_of(decisions, offload=Offload(fraction=0.5, margin=3))
    plan.verify()
    assert plan_from_json(plan_to_json(plan)) == plan


@pytest.mark.parametrize(
    ("decisions", "message"),
    [
        ({(LAYER, "core"): SWAP}, "no region is called 'core'; legal: '', attn_norm, "),
        ({(f"{LAYER}.mlp", "core_attn"): SWAP}, "only a layer has such regions, and 'model.layers.0.mlp' is none"),
        ({(LAYER, "module:no.such"): SWAP}, "the model has no module 'model.layers.0.no.such'"),
        ({(LAYER, "core_attn"): ATTENTION}, "a region has the policy 'offload', not 'attention'"),
        ({LAYER: SWAP}, "policy 'offload' is for regions"),
        ({LAYER: decision("recompute")}, "what is recomputed has no policy 'offload'"),
        (
            {(LAYER, "core_attn"): RECIPE},
            "no region is called 'core_attn'; legal: '' and moe_act for what is recomputed",
        ),
        ({(LAYER, "moe_act"): RECIPE}, "'model.layers.0' has no such part in the trace"),
        ({(f"{LAYER}.mlp.experts", "moe_act"): WHOLE}, "is recomputed by the route 'recipe', not 'submodule'"),
        ({LAYER: decision("recompute", "selective", "recipe")}, "has the policy 'full', not 'selective'"),
        ({LAYER: decision(policy="offload", route="recipe")}, "only what is recomputed has a route"),
        ({LAYER: WHOLE, (LAYER, "core_attn"): SWAP}, "two decisions on one module"),
        (
            {(LAYER, "fused_group_mlp"): SWAP, (LAYER, "moe_act"): SWAP},
            "fused_group_mlp holds moe_act, which has one too",
        ),
        (
            {(LAYER, "module:mlp"): SWAP, (LAYER, "module:mlp.experts"): SWAP},
            "decision on 'module:mlp.experts': it lies inside 'module:mlp'",
        ),
        (
            {(LAYER, "core_attn"): SWAP, f"{LAYER}.self_attn": ATTENTION},
            "it lies inside 'model.layers.0', which has one too",
        ),
        ({("model", "module:"): SWAP, (LAYER, "core_attn"): SWAP}, "it lies inside 'model', which has one too"),
        ({("", "module:"): SWAP, (LAYER, "core_attn"): SWAP}, "it lies inside '', which has one too"),
        ({f"{LAYER}.mlp": WHOLE, (f"{LAYER}.mlp.experts", "moe_act"): RECIPE}, "it lies inside 'model.layers.0.mlp'"),
    ],
)
def test_what_is_not(decisions, message):
    with pytest.raises(InvalidPlanError) as error:
        plan_of(decisions).verify()
    assert message in str(error.value)


def test_the_chain_names_what_is_copied():
    decisions = {(LAYER, "core_attn"): SWAP, (LAYER, "attn_proj"): KEEP, f"{LAYER}.input_layernorm": RECIPE}
    plan_of(decisions, prefetch_chain=(LAYER,)).verify()
    with pytest.raises(InvalidPlanError, match="which is recomputed: nothing of it is copied"):
        plan_of(decisions, prefetch_chain=(f"{LAYER}.input_layernorm",)).verify()


def test_settings_are_checked():
    for options in ({"fraction": 2}, {"margin": -1}, {"min_tensor_elements": True}, {"max_inflight": -1}):
        with pytest.raises(InvalidPlanError, match="settings of offload: "):
            plan_of({(LAYER, "core_attn"): SWAP}, offload=Offload(**options)).verify()
