"""What a plan of regions and recomputed parts comes to, by hand."""

from dataclasses import replace

import pytest

from memopt.ir import Action, Decision, Kind, Offload, Plan, RegionKey, account
from tests.builders import MIB, Build, Save, graph_of, mib_save, moe_layers

LAYERS = Build(classes={"layers": "ModuleList"})
FIRST, SECOND = "model.layers.0", "model.layers.1"


def swap(fqn, region, why="asked for"):
    return {RegionKey(fqn, region): Decision(action=Action.SWAP, by="hand", why=why, policy="offload")}


def keep(fqn, region, why="margin: last"):
    return {RegionKey(fqn, region): Decision(action=Action.KEEP, by="hand", why=why, policy="offload")}


def recipe(fqn, region="", route="recipe", why="layernorm: cheap"):
    decision = Decision(action=Action.RECOMPUTE, by="hand", why=why, policy="full", route=route)
    return {RegionKey(fqn, region): decision}


def planned(graph, *decisions, min_tensor_elements=1):
    plan = replace(Plan(graph=graph), offload=Offload(min_tensor_elements=min_tensor_elements))
    for decision in decisions:
        plan = plan.decide(decision)
    plan.verify()
    return plan


def accounted(graph, *decisions, **options):
    totals = account(planned(graph, *decisions, **options))
    assert sum(size for _, size in totals.offload.stays) == totals.offload.saved_bytes - totals.net_freed_bytes
    return totals


def layers(*saves, **options):
    return graph_of(*saves, build=replace(LAYERS, **options))


def group(totals, region, fqn=FIRST):
    return next(group for group in totals.offload.groups if group.key == RegionKey(fqn, region))


def test_parameters_and_small_tensors_stay():
    graph = layers(
        mib_save(f"{FIRST}.mlp.up_proj", 2),
        mib_save(f"{FIRST}.mlp.up_proj", 8, kind=Kind.PARAMETER),
        mib_save(f"{FIRST}.mlp.up_proj", 3, kind=Kind.PARAMETER_CAST),
        Save(owner=f"{FIRST}.mlp.up_proj", shape=(499,)),
        Save(owner=f"{FIRST}.mlp.up_proj", shape=(500,), requires_grad=False),
    )
    totals = accounted(graph, swap(FIRST, "mlp_fc1"), min_tensor_elements=500)
    fc1 = group(totals, "mlp_fc1")
    assert (fc1.num_tensors, fc1.moved_bytes) == (2, 2 * MIB + 2000)
    assert fc1.kept == (("parameter", 8 * MIB), ("parameter cast", 3 * MIB), ("under 500 elements", 1996))
    assert totals.offload.stays == (("parameter cast", 3 * MIB), ("under 500 elements", 1996))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (mib_save(f"{FIRST}.mlp.down_proj", storage="x"), "also saved by mlp_fc2, which stays"),
        (mib_save(f"{FIRST}.embed", storage="x"), "also saved by what is in no region, which stays"),
        (mib_save(f"{FIRST}.mlp.down_proj", storage="x", kind=Kind.PARAMETER), "parameter"),
        (Save(owner=f"{FIRST}.mlp.up_proj", shape=(3,), storage="x", storage_bytes=MIB), "under 100 elements"),
    ],
)
def test_a_storage_stays_with_any_of_its_saves_in_the_layer(other, reason):
    graph = layers(mib_save(f"{FIRST}.mlp.up_proj", storage="x"), other)
    totals = accounted(graph, swap(FIRST, "mlp_fc1"), min_tensor_elements=100)
    assert (totals.swap_bytes, group(totals, "mlp_fc1").kept[0]) == (0, (reason, MIB))


def test_a_storage_is_moved_once_whoever_saves_it_again():
    rope = {"storage": "rope", "node": "MulBackward0"}
    graph = layers(
        *(
            mib_save(f"{fqn}.mlp.{name}", **rope)
            for fqn in (FIRST, SECOND)
            for name in ("up_proj", "gate_proj", "down_proj")
        )
    )
    both = [swap(fqn, region) for fqn in (FIRST, SECOND) for region in ("mlp_fc1", "mlp_fc2")]
    totals = accounted(graph, *both)
    assert [(g.num_tensors, g.moved_bytes, g.duplicate_bytes) for g in totals.offload.groups] == [
        (1, MIB, 0), (0, 0, MIB), (0, 0, MIB), (0, 0, MIB),
    ]  # fmt: skip
    assert (totals.swap_bytes, totals.num_tensors, totals.net_freed_bytes) == (MIB, 1, MIB)


def test_what_one_layer_moves_and_another_keeps_is_not_freed():
    saves = [mib_save(f"{fqn}.mlp.up_proj", storage="x") for fqn in (FIRST, SECOND)]
    totals = accounted(layers(*saves), swap(FIRST, "mlp_fc1"), keep(SECOND, "mlp_fc1"))
    assert (totals.swap_bytes, totals.freed_bytes, totals.offload.stays) == (MIB, 0, (("margin", MIB),))


def test_what_the_model_returns_is_copied_and_not_freed():
    graph = layers(mib_save(f"{FIRST}.mlp.up_proj", storage="x"), held=("x",))
    totals = accounted(graph, swap(FIRST, "mlp_fc1"))
    assert (totals.swap_bytes, totals.freed_bytes) == (MIB, 0)
    assert totals.offload.stays == (("input or output of the model", MIB),)


@pytest.mark.parametrize(
    ("shapes", "num_tensors", "num_bytes"),
    [
        ([(128, 1024)], 1, MIB),  # half of the storage: all of it
        ([(127, 1024)], 1, 127 * 4096),  # less: the view, gathered
        ([(100, 1024), (100, 1024)], 1, 100 * 4096),  # the same view twice
        ([(100, 1024), (27, 1024)], 2, 127 * 4096),
        ([(100, 1024), (28, 1024)], 1, MIB),
    ],
)
def test_views_of_less_than_half_a_storage_are_gathered(shapes, num_tensors, num_bytes):
    saves = [Save(owner=f"{FIRST}.mlp.up_proj", shape=shape, storage="x", storage_bytes=MIB) for shape in shapes]
    totals = accounted(layers(*saves), swap(FIRST, "mlp_fc1"))
    assert (totals.num_tensors, totals.swap_bytes, totals.net_freed_bytes) == (num_tensors, num_bytes, MIB)


def test_a_module_of_a_pattern_has_all_that_is_saved_in_it():
    graph = graph_of(mib_save("body.a", 1), mib_save("body.b", 2), mib_save("head", 4))
    totals = accounted(graph, swap("body", "module:"))
    assert (totals.swap_bytes, totals.offload.stays) == (3 * MIB, (("outside of what is offloaded", 4 * MIB),))


def test_the_output_of_a_recomputed_norm_is_not_kept():
    saves, build = moe_layers(1)
    totals = accounted(graph_of(*saves, build=build), recipe(f"{FIRST}.input_layernorm"))
    (norm,) = totals.offload.recipes
    assert (norm.dropped_bytes, norm.output_bytes, norm.input_bytes, norm.num_calls) == (8 * MIB, 4 * MIB, 4 * MIB, 1)
    assert (totals.freed_bytes, totals.added_bytes, totals.swap_bytes) == (12 * MIB, 4 * MIB, 0)
    assert totals.replay_bytes == 12 * MIB
    assert ("held for a replay", 4 * MIB) in totals.offload.stays


def test_the_input_of_a_recomputed_norm_is_offloaded_with_its_region():
    saves, build = moe_layers(1)
    graph = graph_of(*saves, build=build)
    totals = accounted(graph, recipe(f"{FIRST}.input_layernorm"), swap(FIRST, "attn_norm"))
    assert (group(totals, "attn_norm").moved_bytes, totals.net_freed_bytes, totals.added_bytes) == (
        4 * MIB,
        12 * MIB,
        0,
    )
    stays = accounted(graph, recipe(f"{FIRST}.input_layernorm"), swap(FIRST, "attn_norm"), min_tensor_elements=MIB + 1)
    assert stays.added_bytes == 4 * MIB


def test_an_output_that_another_layer_saves_stays():
    graph = layers(
        mib_save(f"{FIRST}.input_layernorm", 2),
        mib_save(f"{FIRST}.mlp.up_proj", storage="normed"),
        mib_save(f"{SECOND}.mlp.up_proj", storage="normed"),
        inputs={f"{FIRST}.input_layernorm": {"entry": MIB}},
        outputs={f"{FIRST}.input_layernorm": {"normed": MIB}},
    )
    totals = accounted(graph, recipe(f"{FIRST}.input_layernorm"))
    assert (totals.freed_bytes, totals.added_bytes) == (2 * MIB, MIB)
    assert totals.offload.recipes[0].output_bytes == MIB


def test_a_part_that_writes_to_its_input_has_no_recipe():
    graph = layers(
        mib_save(f"{FIRST}.mlp.act_fn", storage="up"),
        mib_save(f"{FIRST}.mlp.down_proj", storage="up"),
        inputs={f"{FIRST}.mlp.act_fn": {"up": MIB}},
        outputs={f"{FIRST}.mlp.act_fn": {"up": MIB}},
    )
    totals = accounted(graph, recipe(f"{FIRST}.mlp.act_fn"))
    assert (totals.net_freed_bytes, totals.offload.recipes[0].output_bytes) == (0, 0)


def test_the_experts_activation_is_recomputed_as_a_part():
    saves, build = moe_layers(1)
    totals = accounted(graph_of(*saves, build=build), recipe(f"{FIRST}.mlp.experts", "moe_act"), swap(FIRST, "moe_act"))
    (part,) = totals.offload.recipes
    assert (part.dropped_bytes, part.output_bytes, part.input_bytes) == (8 * MIB, 8 * MIB, 16 * MIB)
    assert (group(totals, "moe_act").moved_bytes, totals.net_freed_bytes) == (16 * MIB, 32 * MIB)


def test_almost_all_of_a_layer_leaves_with_both():
    saves, build = moe_layers(2)
    graph = graph_of(*saves, build=build)
    parts = [recipe(f"{fqn}.input_layernorm") | recipe(f"{fqn}.mlp.experts", "moe_act") for fqn in (FIRST, SECOND)]
    regions = ("core_attn", "attn_proj", "expert_fc1", "attn_norm", "moe_act")
    totals = accounted(graph, *parts, *(swap(fqn, region) for fqn in (FIRST, SECOND) for region in regions))
    assert [(share.gone_bytes, share.saved_bytes) for share in totals.offload.layers] == [(60 * MIB, 60 * MIB)] * 2
    assert totals.offload.stays == ()
    assert totals.swap_bytes == 2 * (8 + 8 + 4 + 16) * MIB


def test_what_a_checkpointed_module_holds_stays():
    graph = layers(
        mib_save(f"{FIRST}.mlp.up_proj", 4, storage="entry"),
        mib_save(f"{FIRST}.mlp.down_proj", 8),
        mib_save(f"{FIRST}.self_attn.o_proj", 4, storage="entry"),
        inputs={f"{FIRST}.mlp": {"entry": 4 * MIB}},
    )
    totals = accounted(graph, recipe(f"{FIRST}.mlp", route="submodule"), swap(FIRST, "attn_proj"))
    assert (totals.swap_bytes, totals.net_freed_bytes) == (0, 8 * MIB)  # moving it would free nothing
    assert totals.offload.stays == (("also saved by mlp_act, which stays", 4 * MIB),)
    assert [target.fqn for target in totals.targets] == [f"{FIRST}.mlp"]


def test_a_plan_of_whole_modules_has_no_offload():
    decision = Decision(action=Action.SWAP, by="hand", why="large", policy="attention")
    plan = Plan(graph=layers(mib_save(f"{FIRST}.self_attn"))).decide({RegionKey(f"{FIRST}.self_attn"): decision})
    assert account(plan).offload is None
