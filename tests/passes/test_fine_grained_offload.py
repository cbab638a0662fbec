"""The pass fine-grained-offload: which groups it finds, which of them it keeps, and what it refuses."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.errors import IllegalValueError, IncompatibleError, NothingOfThatKindError, UnmatchedPatternError
from memopt.ir import Action, Decision, Offload, Plan, RegionKey, account
from memopt.passes import (
    ActivationCheckpoint,
    AttentionSwap,
    FineGrainedOffload,
    Pipeline,
    PrefetchChain,
    RecomputeParts,
    make_pass,
)
from tests.builders import MIB, Build, graph_of, mib_save, moe_layers

SMALL = {"min_tensor_elements": 1000}


def fresh(num_layers=3, **options):
    saves, build = moe_layers(num_layers, **options)
    return Plan(graph=graph_of(*saves, build=build))


def offloaded(*modules, plan=None, **options):
    pass_ = FineGrainedOffload(modules=modules, **{**SMALL, **options})
    return Pipeline([pass_, PrefetchChain()]).run(plan or fresh())


def actions(plan):
    return {
        str(key).removeprefix("model.layers."): decision.action.value
        for key, decision in plan.decisions.items()
        if decision.policy == "offload"
    }


def test_it_offloads_every_group_but_the_last_of_each_region():
    plan = offloaded("core_attn", "expert_fc1")
    assert actions(plan) == {
        "0:core_attn": "swap", "0:expert_fc1": "swap", "1:core_attn": "swap", "1:expert_fc1": "swap",
        "2:core_attn": "keep", "2:expert_fc1": "keep",
    }  # fmt: skip
    assert plan.prefetch_chain == tuple(f"model.layers.{n}" for n in range(3))
    assert (
        plan.decisions[RegionKey("model.layers.2", "core_attn")].why
        == "margin: the last core_attn would come straight back"
    )


def test_the_plan_holds_the_settings():
    plan = offloaded("core_attn", fraction=0.5, max_inflight=2, pp_rank=1, pp_rank_delta_bytes=7, margin=9)
    assert plan.offload == Offload(
        min_tensor_elements=1000, fraction=0.5, max_inflight=2, pp_rank=1, pp_rank_delta_bytes=7, margin=9
    )


def test_a_storage_that_two_regions_save_is_moved_once():
    totals = account(offloaded("core_attn", "attn_proj", margin=0))
    groups = {str(group.key): group for group in totals.offload.groups}
    assert groups["model.layers.0:core_attn"].moved_bytes == 8 * MIB
    assert groups["model.layers.0:attn_proj"].moved_bytes == 0
    assert groups["model.layers.0:attn_proj"].duplicate_bytes == 4 * MIB
    assert (totals.swap_bytes, totals.num_tensors, totals.net_freed_bytes) == (24 * MIB, 6, 24 * MIB)


def test_a_group_without_bytes_is_no_margin():
    """What attn_proj saves counts for core_attn, whose last group stays and keeps it too."""
    plan = offloaded("core_attn", "attn_proj")
    assert actions(plan)["2:attn_proj"] == "swap"
    group = next(g for g in account(plan).offload.groups if str(g.key) == "model.layers.2:attn_proj")
    assert (group.moved_bytes, dict(group.kept)["also saved by core_attn, which stays"]) == (0, 4 * MIB)


def test_the_rules_act_on_groups_in_forward_order():
    plan = offloaded("core_attn", "expert_fc1", margin=0, pp_rank=1, pp_rank_delta_bytes=9 * MIB, fraction=0.5)
    whys = [d.why.partition(":")[0] if d.action is Action.KEEP else "" for d in plan.decisions.values()]
    assert whys == ["pipeline", "pipeline", "", "", "fraction", "fraction"]


def test_the_whole_block_of_experts_is_one_region():
    plan = offloaded("fused_group_mlp", margin=0)
    assert actions(plan) == dict.fromkeys(("0:fused_group_mlp", "1:fused_group_mlp", "2:fused_group_mlp"), "swap")
    assert account(plan).swap_bytes == 3 * 40 * MIB


def test_a_region_that_no_layer_has_is_noted_where_others_are_there():
    assert offloaded("core_attn", "mlp_fc1").notes == (
        "activation_offload: no layer of the model saves anything in mlp_fc1",
    )
    with pytest.raises(NothingOfThatKindError) as error:
        offloaded("mlp_fc1", "router")
    assert str(error.value) == (
        "activation_offload found no mlp_fc1 or router in Qwen3MoeForCausalLM; it has: attn_norm, qkv_linear, core_attn, "
        "attn_proj, expert_fc1, moe_act, moe_fc2"
    )


def test_parts_of_other_names_are_told():
    layers = [mib_save(f"model.layers.{n}.{part}") for n in range(2) for part in ("norm", "mixer.in", "mixer.out")]
    graph = graph_of(*layers, build=Build(class_name="MambaForCausalLM", classes={"layers": "ModuleList"}))
    for pass_, what in ((FineGrainedOffload(modules=("core_attn",)), "core_attn"), (RecomputeParts(), "layernorm")):
        with pytest.raises(NothingOfThatKindError) as error:
            pass_.run(Plan(graph=graph))
        assert str(error.value).partition("found ")[2] == (
            f"no {what} in MambaForCausalLM; its layers have parts of other names: norm, mixer; move what one saves by "
            "activation_offload of module:*.mixer, or recompute whole layers by activation_checkpoint"
        )
    assert actions(offloaded("module:*.mixer", margin=0, plan=Plan(graph=graph)))


def test_a_model_without_layers_knows_patterns_only():
    plan = Plan(graph=graph_of(mib_save("body.mlp"), mib_save("body.head")))
    with pytest.raises(
        NothingOfThatKindError,
        match="found no layers in which anything is saved; try activation_off",
    ):
        offloaded("core_attn", plan=plan)
    assert actions(offloaded("module:body.*", margin=0, plan=plan)) == {
        "body.mlp:module:": "swap",
        "body.head:module:": "swap",
    }


def test_a_pattern_beside_regions_is_a_part_of_its_layer():
    plan = offloaded("core_attn", "module:*.experts", "module:*.layers.0.mlp", margin=0)
    assert actions(plan) == {
        "0:core_attn": "swap", "1:core_attn": "swap", "2:core_attn": "swap",
        "0:module:mlp": "swap", "1:module:mlp.experts": "swap", "2:module:mlp.experts": "swap",
    }  # fmt: skip
    assert account(plan).swap_bytes == 3 * (4 + 40) * MIB


@pytest.mark.parametrize("pattern", ["module:model.layers.1", "module:model", "module:*"])
def test_a_pattern_that_takes_layers_excludes_regions(pattern):
    assert actions(offloaded(pattern, margin=0))
    with pytest.raises(IncompatibleError, match=r"module:.* takes 'model.*' as a whole, and core_attn with it"):
        offloaded(pattern, "core_attn")


def test_a_pattern_takes_what_a_region_has():
    """Of attention that is claimed as a whole no region is left."""
    plan = offloaded("expert_fc1", "core_attn", "module:*.self_attn", margin=0)
    assert "0:core_attn" not in actions(plan)
    assert plan.notes == ("activation_offload: no layer of the model saves anything in core_attn",)


def test_a_pattern_that_matches_nothing_names_the_nearest():
    with pytest.raises(
        UnmatchedPatternError, match="pattern 'module:model.lyers.0' matches no module .* did you mean "
    ):
        offloaded("module:model.lyers.0")


def test_a_recomputed_part_is_seen_by_what_it_is_called_with():
    plan = RecomputeParts(modules=("layernorm", "moe_act")).run(fresh())
    plan = offloaded("attn_norm", "qkv_linear", "moe_act", "moe_fc2", margin=0, plan=plan)
    moved = {group.key.region: group.moved_bytes for group in account(plan).offload.groups}
    assert moved == {"attn_norm": 4 * MIB, "moe_act": 16 * MIB}
    assert plan.notes == ("activation_offload: no layer of the model saves anything in qkv_linear, moe_fc2",)


def test_what_recomputing_leaves_nothing_of_is_an_error():
    plan = RecomputeParts(modules=("moe",)).run(fresh())
    with pytest.raises(
        IncompatibleError, match="what is recomputed leaves nothing saved to offload in expert_fc1; drop one"
    ):
        offloaded("core_attn", "expert_fc1", plan=plan)


@pytest.mark.parametrize("other", [AttentionSwap(), ActivationCheckpoint()])
def test_it_excludes_swap_and_checkpointing_in_any_order(other):
    with pytest.raises(IncompatibleError, match="incompatible"):
        offloaded("core_attn", plan=other.run(fresh()))
    with pytest.raises(IncompatibleError, match="incompatible"):
        other.run(offloaded("core_attn"))


def test_it_leaves_earlier_decisions_alone():
    key = RegionKey("model.layers.1", "core_attn")
    by_hand = Decision(action=Action.KEEP, by="hand", why="because", policy="offload")
    plan = offloaded("core_attn", "attn_proj", margin=0, plan=fresh().decide({key: by_hand}))
    assert plan.decisions[key] == by_hand
    assert account(plan).swap_bytes == 16 * MIB


def test_other_options_are_a_contradiction():
    once = offloaded("core_attn")
    assert offloaded("core_attn", plan=once) == once
    for options in ({"margin": 0}, {"max_inflight": 1}):
        with pytest.raises(IncompatibleError, match="was run before with other options"):
            offloaded("core_attn", plan=once, **options)


@pytest.mark.parametrize("options", [{"modules": ()}, {"fraction": 2}, {"margin": -1}, {"pp_rank": True}])
def test_options_are_checked(options):
    with pytest.raises(IllegalValueError):
        FineGrainedOffload(**options)


def test_the_command_line_writes_a_list_with_plus():
    made = make_pass("fine-grained-offload:modules=core_attn+module:model.*.mlp+module:*:fraction=0.25:margin=auto")
    assert made == FineGrainedOffload(modules=("core_attn", "module:model.*.mlp", "module:*"), fraction=0.25)


PARTS = ("self_attn", "self_attn.q_proj", "self_attn.o_proj", "input_layernorm", "mlp.up_proj", "mlp.down_proj")
SAVES = st.lists(
    st.builds(
        lambda layer, part, mib, storage, node: mib_save(
            f"model.layers.{layer}.{part}", mib, node=node, storage=storage and f"{storage} {mib}"
        ),
        st.integers(0, 2),
        st.sampled_from(PARTS),
        st.integers(1, 2),
        st.sampled_from([None, "shared", "other"]),
        st.sampled_from(["MmBackward0", "SoftmaxBackward0"]),
    ),
    min_size=1,
    max_size=20,
)


@settings(deadline=None, max_examples=80)
@given(
    saves=SAVES,
    modules=st.lists(
        st.sampled_from(["core_attn", "qkv_linear", "attn_norm", "mlp_fc1", "mlp_fc2"]), min_size=1, unique=True
    ),
    margin=st.sampled_from(["auto", 0, MIB, 5 * MIB]),
    fraction=st.sampled_from([0, 0.5, 1]),
)
def test_what_holds_of_every_plan(saves, modules, margin, fraction):
    build = Build(classes={"layers": "ModuleList"})
    plan = Plan(graph=graph_of(*sorted(saves, key=lambda save: save.owner.split(".")[2]), build=build))
    offload = FineGrainedOffload(modules=tuple(modules), margin=margin, fraction=fraction, **SMALL)
    try:
        once = Pipeline([offload, PrefetchChain()]).run(plan)
    except NothingOfThatKindError:
        return
    assert Pipeline([offload, PrefetchChain()]).run(once) == once
    totals = account(once)
    account_ = totals.offload
    assert sum(group.moved_bytes for group in account_.groups) == totals.swap_bytes
    assert totals.freed_bytes <= totals.swap_bytes <= account_.saved_bytes
    assert sum(size for _, size in account_.stays) == account_.saved_bytes - totals.net_freed_bytes
    assert all(not group.moved_bytes for group in account_.groups if group.action is Action.KEEP)
