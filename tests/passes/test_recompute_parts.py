"""The pass recompute-parts: which modules and parts its names stand for, and what it refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt.errors import IllegalValueError, IncompatibleError, NothingOfThatKindError, UnknownNamesError
from memopt.ir import RECOMPUTABLE, Action, Decision, Plan, RegionKey
from memopt.passes import ActivationCheckpoint, AttentionSwap, FineGrainedOffload, Pipeline, RecomputeParts, make_pass
from tests.builders import Build, graph_of, mib_save, moe_layers


def fresh(num_layers=2, **options):
    saves, build = moe_layers(num_layers, **options)
    return Plan(graph=graph_of(*saves, build=build))


def dense():
    saves = [
        mib_save("model.layers.0.input_layernorm"),
        mib_save("model.layers.0.self_attn.q_norm"),
        mib_save("model.layers.0.self_attn.o_proj"),
        mib_save("model.layers.0.post_attention_layernorm"),
        mib_save("model.layers.0.mlp.up_proj"),
        mib_save("model.layers.0.mlp.act_fn"),
        mib_save("model.layers.0.mlp.down_proj"),
        mib_save("model.norm"),
    ]
    return Plan(graph=graph_of(*saves, build=Build(classes={"layers": "ModuleList"})))


def decided(plan, *modules):
    plan = Pipeline([RecomputeParts(modules=modules)]).run(plan)
    return {str(key).removeprefix("model.layers."): decision.route for key, decision in plan.decisions.items()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "layernorm",
            {"0.input_layernorm": "recipe", "0.self_attn.q_norm": "recipe", "0.post_attention_layernorm": "recipe"},
        ),
        ("mlp_act", {"0.mlp.act_fn": "recipe"}),
        ("mlp", {"0.mlp": "submodule"}),
    ],
)
def test_the_parts_of_a_dense_layer(name, expected):
    assert decided(dense(), name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layernorm", {"0.input_layernorm": "recipe", "1.input_layernorm": "recipe"}),
        ("moe_act", {"0.mlp.experts:moe_act": "recipe", "1.mlp.experts:moe_act": "recipe"}),
        ("moe", {"0.mlp": "submodule", "1.mlp": "submodule"}),
    ],
)
def test_the_parts_of_a_layer_with_experts(name, expected):
    assert decided(fresh(), name) == expected


def test_experts_that_are_modules_have_their_activations_recomputed():
    saves = [mib_save(f"model.layers.0.mlp.experts.{n}.act_fn") for n in range(2)]
    saves += [mib_save("model.layers.0.mlp.shared_expert.act_fn"), mib_save("model.layers.0.mlp.shared_expert_gate")]
    plan = Plan(graph=graph_of(*saves, build=Build(classes={"layers": "ModuleList"})))
    assert decided(plan, "moe_act") == {"0.mlp.experts.0.act_fn": "recipe", "0.mlp.experts.1.act_fn": "recipe"}
    assert decided(plan, "shared_expert") == {"0.mlp.shared_expert": "submodule"}


def test_a_name_that_the_model_has_nothing_of_is_noted_where_others_are_there():
    plan = RecomputeParts(modules=("layernorm", "mlp_act")).run(fresh())
    assert plan.notes == ("recompute: the model has no mlp_act that saves anything",)
    with pytest.raises(NothingOfThatKindError) as error:
        RecomputeParts(modules=("mlp_act", "shared_expert")).run(fresh())
    assert str(error.value) == (
        "recompute found no mlp_act or shared_expert in Qwen3MoeForCausalLM; it has: layernorm, moe_act, moe"
    )


@pytest.mark.parametrize(
    ("modules", "error"),
    [((), IllegalValueError), (("norm",), UnknownNamesError), (("moe", "moe_act"), IncompatibleError)],
)
def test_names_are_checked(modules, error):
    with pytest.raises(error):
        RecomputeParts(modules=modules)


def test_it_comes_before_offload():
    plan = FineGrainedOffload(modules=("core_attn",)).run(fresh())
    with pytest.raises(IncompatibleError, match="comes before fine-grained-offload"):
        RecomputeParts().run(plan)


@pytest.mark.parametrize("other", [ActivationCheckpoint(), AttentionSwap()])
def test_it_excludes_swap_and_checkpointing_in_any_order(other):
    saves = [mib_save("model.layers.0.input_layernorm"), mib_save("model.layers.0.self_attn.q_norm")]
    plan = Plan(graph=graph_of(*saves, build=Build(classes={"layers": "ModuleList"})))
    with pytest.raises(IncompatibleError, match="incompatible"):
        RecomputeParts().run(other.run(plan))
    with pytest.raises(IncompatibleError, match="incompatible"):
        other.run(RecomputeParts().run(plan))


def test_it_leaves_earlier_decisions_alone():
    by_hand = Decision(action=Action.RECOMPUTE, by="hand", why="because", policy="full")
    plan = dense().decide({RegionKey("model.layers.0.input_layernorm"): by_hand})
    assert decided(plan, "layernorm")["0.input_layernorm"] == ""


def test_other_options_are_a_contradiction():
    with pytest.raises(IncompatibleError, match="was run before with other options"):
        RecomputeParts(modules=("mlp",)).run(RecomputeParts(modules=("mlp_act",)).run(dense()))


def test_the_command_line_writes_a_list_with_plus():
    assert make_pass("recompute-parts:modules=layernorm+moe_act") == RecomputeParts(modules=("layernorm", "moe_act"))


@given(st.sets(st.sampled_from(sorted({*RECOMPUTABLE} - {"moe", "mlp"})), min_size=1), st.sampled_from([dense, fresh]))
def test_it_is_idempotent_and_verifies(modules, make):
    pass_ = RecomputeParts(modules=tuple(sorted(modules)))
    try:
        once = Pipeline([pass_]).run(make())
    except NothingOfThatKindError:
        return
    assert Pipeline([pass_]).run(once) == once
    assert all(decision.action is Action.RECOMPUTE for decision in once.decisions.values())
