"""The pass activation-checkpoint: which layers it decides on, by which route, and what it leaves alone."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memopt.errors import SWAP_AND_CHECKPOINT, IncompatibleError, NoLayerContainerError, NothingToCheckpointError
from memopt.ir import Action, Decision, Family, Kind, KvSharing, ModuleCall, Plan, RegionKey, SavedTensor, account
from memopt.passes import ActivationCheckpoint, AttentionSwap, Pipeline
from tests.builders import MIB, Build, Function, graph_of, mib_save
from tests.ir.trees import fake, graph_of_model, made, native_layer, stack

PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
NATIVE = Build(
    class_name="LlamaForCausalLM",
    classes={"layers": "ModuleList"},
    bases={"0": ("GradientCheckpointingLayer",), "1": ("GradientCheckpointingLayer",)},
    native_checkpointing=True,
)


def layers(num_layers=2, parts=PARTS, path="model.layers"):
    """Return what layers save: 1 MiB in each of their parts."""
    return [mib_save(f"{path}.{n}.{part}") for n in range(num_layers) for part in parts]


def planned(*saves, build=NATIVE, **options):
    return Pipeline([ActivationCheckpoint(**options)]).run(Plan(graph=graph_of(*saves, build=build)))


def decided(plan):
    """Return (route, policy) by FQN; the route and the policy are all that the runtime obeys."""
    assert all(decision.action is Action.RECOMPUTE for decision in plan.decisions.values())
    return {key.fqn: (decision.route, decision.policy) for key, decision in plan.decisions.items()}


def reasons(plan):
    return {decision.why for decision in plan.decisions.values()}


def by_parts(parts=PARTS, num_layers=2, route="submodule", policy="full"):
    return {f"model.layers.{n}.{part}": (route, policy) for n in range(num_layers) for part in parts}


def whole(route, policy):
    return {f"model.layers.{n}": (route, policy) for n in range(2)}


# acts


def test_full_takes_the_native_route_where_everything_fits():
    plan = planned(*layers())
    assert decided(plan) == whole("native", "full")
    assert reasons(plan) == {"every layer is a fully trainable GradientCheckpointingLayer"}
    assert plan.notes == plan.prefetch_chain == ()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"native_checkpointing": False}, "LlamaForCausalLM does not support gradient checkpointing"),
        ({"bases": {"0": ("GradientCheckpointingLayer",)}}, "model.layers.1 is no GradientCheckpointingLayer"),
        ({"frozen": ("model.layers.1.mlp",)}, "model.layers.1 is not fully trainable"),
    ],
)
def test_full_goes_by_parts_where_something_does_not_fit(change, why):
    plan = planned(*layers(), build=replace(NATIVE, **change))
    assert decided(plan) == by_parts()
    assert f"mlp, because {why}" in reasons(plan)
    assert f"norm 1, because {why}" in reasons(plan)


def test_a_frozen_module_beside_the_layers_does_not_matter():
    assert decided(planned(*layers(), build=replace(NATIVE, frozen=("model",)))) == whole("native", "full")


def test_selective_takes_whole_layers():
    for build in (NATIVE, replace(NATIVE, native_checkpointing=False)):
        assert decided(planned(*layers(), mode="selective", build=build)) == whole("layer", "selective")


def test_compiled_plans_say_so():
    full = planned(*layers(), compiles=True)
    assert decided(full) == by_parts(("self_attn", "mlp"), route="compile")
    selective = planned(*layers(), mode="selective", compiles=True)
    assert decided(selective) == whole("compile", "selective")
    for plan in (full, selective):
        assert all(decision.compiles for decision in plan.decisions.values())
    assert not any(decision.compiles for decision in planned(*layers()).decisions.values())


def test_shared_keys_in_the_cache_leave_attention_out():
    build = replace(NATIVE, kv_sharing=KvSharing.CACHE)
    no_attention = [part for part in PARTS if part != "self_attn"]
    full = planned(*layers(), build=build)
    assert decided(full) == by_parts(no_attention)
    assert full.notes == ()
    selective = planned(*layers(), build=build, mode="selective")
    assert decided(selective) == by_parts(no_attention)
    (note,) = selective.notes
    assert note.startswith("selective checkpointing is downgraded: layers share keys and values through the cache")
    assert decided(planned(*layers(), build=build, compiles=True)) == by_parts(("mlp",), route="compile")


def test_shared_keys_in_a_dict_are_no_matter():
    build = replace(NATIVE, kv_sharing=KvSharing.DICT)
    assert decided(planned(*layers(), build=build)) == whole("native", "full")
    selective = planned(*layers(), build=build, mode="selective")
    assert (decided(selective), selective.notes) == (whole("layer", "selective"), ())


def test_a_layer_of_unknown_parts_is_recomputed_whole():
    plan = planned(*layers(parts=("norm", "mixer")), build=replace(NATIVE, native_checkpointing=False))
    assert decided(plan) == whole("layer", "full")
    assert reasons(plan) == {"it has no part of a known name, so that all of it is recomputed"}
    assert decided(planned(*layers(parts=("norm", "mixer")), compiles=True)) == whole("compile", "full")


def test_mixed_layers_are_decided_each_by_its_own_parts():
    saves = [mib_save("model.layers.0.mixer"), mib_save("model.layers.1.mlp"), mib_save("model.layers.1.linear_attn")]
    plan = planned(*saves, build=replace(NATIVE, native_checkpointing=False))
    assert decided(plan) == {
        "model.layers.0": ("layer", "full"),
        "model.layers.1.mlp": ("submodule", "full"),
        "model.layers.1.linear_attn": ("submodule", "full"),
    }


def graph_with_saves(model, owners, **facts):
    """Return the graph of a live model in which each of some modules is called once and saves 1 MiB."""
    graph = graph_of_model(model)
    pattern = graph_of(mib_save("x")).saved[0]
    calls = tuple(
        ModuleCall(
            index=n, fqn=fqn, parent=0 if n else None, first_save=max(n - 1, 0), end_save=n if n else len(owners)
        )
        for n, fqn in enumerate(["", *owners])
    )
    saved = tuple(
        replace(pattern, index=n, call=n + 1, owner=fqn, maker=fqn, storage=n) for n, fqn in enumerate(owners)
    )
    assert all(isinstance(tensor, SavedTensor) for tensor in saved)
    model_facts = replace(graph.model, class_name=type(model).__name__, native_checkpointing=True, **facts)
    return replace(graph, calls=calls, saved=saved, model=model_facts)


def on_live(model, *owners, **options):
    return Pipeline([ActivationCheckpoint(**options)]).run(Plan(graph=graph_with_saves(model, owners)))


def test_two_towers_go_by_parts():
    language, vision = "model.language_model.layers", "model.vision_tower.encoder.layers"
    model = fake("Gemma3ForConditionalGeneration", {language: stack(1, native_layer), vision: stack(1, native_layer)})
    owners = [f"{path}.0{part}" for path in (language, vision) for part in ("", ".self_attn", ".mlp")]
    plan = on_live(model, *owners)
    assert set(decided(plan)) == {fqn for fqn in owners if not fqn.endswith("0")}
    assert "attention, because the model has 2 towers" in reasons(plan)
    assert decided(on_live(model, *owners, mode="selective")).keys() == {f"{language}.0", f"{vision}.0"}


def test_a_property_is_no_part():
    layer = made("Layer", **{"block.mlp": nn.Linear(8, 8)})
    type(layer).mlp = property(lambda self: self.block.mlp)
    model = fake("Model", {"layers": nn.ModuleList([layer])})
    assert decided(on_live(model, "layers.0", "layers.0.block.mlp")) == {"layers.0": ("layer", "full")}


def test_a_part_of_two_layers_is_decided_once():
    shared = nn.Linear(8, 8)
    both = nn.ModuleList([made("Layer", mlp=shared, self_attn=nn.Linear(8, 8)) for _ in range(2)])
    owners = ("layers.0", "layers.0.mlp", "layers.0.self_attn", "layers.1", "layers.1.self_attn")
    plan = on_live(fake("Model", {"layers": both}), *owners)
    assert list(decided(plan)) == ["layers.0.mlp", "layers.0.self_attn", "layers.1.self_attn"]


def test_a_part_that_lies_in_a_whole_layer_too_is_left_to_that():
    shared = nn.Linear(8, 8)
    both = nn.ModuleList([made("Layer", mlp=shared), made("Odd", **{"mixer.inner": shared})])
    plan = on_live(fake("Model", {"layers": both}), "layers.0", "layers.0.mlp", "layers.1")
    assert decided(plan) == {"layers.1": ("layer", "full")}


@pytest.mark.parametrize("num_bytes", [0, MIB, 3 * MIB])
def test_a_result_that_cannot_be_kept_is_noted_with_the_reason(num_bytes):
    functions = [
        Function(
            owner=f"model.layers.{n}.self_attn", first=4 * n + 1, end=4 * n + 2, outputs={f"mixed {n}": 4 * MIB},
            family=Family.ATTENTION, statistics={f"probabilities {n}": num_bytes}, keepable=False,
        )
        for n in range(2)
    ]  # fmt: skip
    build = replace(NATIVE, functions=(*functions, replace(functions[0], family=Family.MM)))
    (note,) = planned(*layers(), mode="selective", build=build).notes
    why = "the kernel saves more than it returns" if num_bytes > 2 * MIB else "it draws random numbers"
    assert note.startswith(f"2 calls of attention run twice, the result not kept: {why}")
    for other in (build, replace(NATIVE, functions=tuple(replace(f, keepable=True) for f in functions))):
        assert planned(*layers(), mode="full" if other is build else "selective", build=other).notes == ()


# leaves alone


def test_a_layer_that_saves_nothing_is_left_as_it_is():
    """As the frozen layers below the first that is trained: autograd does not reach them."""
    saves = layers()
    saves[:4] = [replace(save, kind=Kind.PARAMETER) for save in saves[:4]]
    plan = planned(*saves)
    assert decided(plan) == {"model.layers.1": ("native", "full")}
    assert plan.notes == ("1 of 2 layers save nothing for backward and stay as they are",)


def test_a_part_that_saves_nothing_is_left_as_it_is():
    saves = layers()
    saves[0] = replace(saves[0], kind=Kind.BUFFER)
    plan = planned(*saves, build=replace(NATIVE, frozen=("model.layers.0.mlp",)))
    assert decided(plan) == {key: value for key, value in by_parts().items() if key != "model.layers.0.input_layernorm"}


def test_it_leaves_earlier_decisions_alone():
    graph = graph_of(*layers(), build=NATIVE)
    for action, policy in ((Action.KEEP, "attention"), (Action.RECOMPUTE, "attention-only")):
        earlier = Decision(action=action, by="a user", why="because", policy=policy)
        for fqn in ("model.layers.0", "model.layers.0.mlp"):
            plan = Pipeline([ActivationCheckpoint()]).run(Plan(graph=graph).decide({RegionKey(fqn): earlier}))
            assert plan.decisions.keys() == {RegionKey(fqn), RegionKey("model.layers.1")}
            assert plan.decisions[RegionKey(fqn)] == earlier


@pytest.mark.parametrize("margin_bytes", [0, None])
@pytest.mark.parametrize("options", [{}, {"mode": "selective"}, {"compiles": True}])
def test_swapped_attention_excludes_it(margin_bytes, options):
    """Also where the margin keeps the only target."""
    swapped = AttentionSwap(margin_bytes=margin_bytes).run(Plan(graph=graph_of(*layers(1), build=NATIVE)))
    with pytest.raises(IncompatibleError) as error:
        ActivationCheckpoint(**options).run(swapped)
    assert str(error.value) == SWAP_AND_CHECKPOINT


# edges


def test_a_model_without_layers():
    with pytest.raises(NoLayerContainerError):
        planned(mib_save("model.mlp"))


def test_layers_that_all_save_nothing():
    saves = [replace(save, kind=Kind.PARAMETER) for save in layers()]
    with pytest.raises(NothingToCheckpointError) as error:
        planned(*saves)
    assert str(error.value) == (
        "activation_checkpoint found nothing to recompute in LlamaForCausalLM: 2 of its 2 layers save nothing for "
        "backward; train parameters in or below them, or set activation_checkpoint to off"
    )
    assert error.value.exit_code == 1


def test_layers_that_the_model_checkpoints_itself():
    saves = [replace(save, kind=Kind.PARAMETER) for save in layers()]
    graph = replace(graph_of(*saves, build=NATIVE), checkpointed=("model.layers.0", "model.layers.1", "model.norm"))
    with pytest.raises(NothingToCheckpointError) as error:
        ActivationCheckpoint().run(Plan(graph=graph))
    assert str(error.value) == (
        "activation_checkpoint found nothing to recompute in LlamaForCausalLM: 2 of its 2 layers save nothing for "
        "backward, 2 of them because the model's own forward calls torch.utils.checkpoint there; turn the model's own "
        "checkpointing off (model.gradient_checkpointing_disable()), or set activation_checkpoint to off"
    )


def test_layers_whose_forward_is_called_and_not_they():
    graph = graph_of(*layers(), build=NATIVE)
    uncalled = replace(graph, calls=tuple(replace(call, fqn="") for call in graph.calls))
    with pytest.raises(NothingToCheckpointError) as error:
        ActivationCheckpoint().run(Plan(graph=uncalled))
    assert str(error.value) == (
        "activation_checkpoint found nothing to recompute in LlamaForCausalLM: 2 of its 2 layers save nothing for "
        "backward, 2 of them because no step calls them, or their forward is called without its hooks; have the model "
        "call layer(...), not layer.forward(...), or set activation_checkpoint to off"
    )


@pytest.mark.parametrize("parts", [("self_attn",), ("mixer",)])
def test_layers_whose_parts_may_not_run_twice(parts):
    with pytest.raises(NothingToCheckpointError, match=r"0 of its 2 layers .* have no part that may run twice"):
        planned(*layers(parts=parts), build=replace(NATIVE, kv_sharing=KvSharing.CACHE))


# properties

owners = st.sampled_from(
    [f"model.layers.{n}{part}" for n in range(3) for part in ("", *(f".{p}" for p in PARTS), ".x")]
)
saves = st.lists(
    st.builds(
        mib_save,
        owners,
        storage=st.sampled_from([None, None, "one", "two"]),
        kind=st.sampled_from(Kind),
    ),
    min_size=1,
    max_size=12,
)
builds = st.builds(
    Build,
    classes=st.just({"layers": "ModuleList"}),
    bases=st.just({"0": ("GradientCheckpointingLayer",), "1": ("GradientCheckpointingLayer",)}),
    aliases=st.sampled_from([{}, {"model.layers.0.mlp": ("model.layers.1.mlp2",)}]),
    frozen=st.sampled_from([(), ("model.layers.0",)]),
    native_checkpointing=st.booleans(),
    kv_sharing=st.sampled_from(KvSharing),
)


@settings(deadline=None, max_examples=100)
@given(saves=saves, build=builds, mode=st.sampled_from(["full", "selective"]), compiles=st.booleans())
def test_it_is_idempotent_and_verifies(saves, build, mode, compiles):
    saves = sorted([*saves, mib_save("model.layers.1.x")], key=lambda save: save.owner)
    pass_ = ActivationCheckpoint(mode=mode, compiles=compiles)
    plan = Plan(graph=graph_of(*saves, build=build))
    try:
        once = Pipeline([pass_]).run(plan)
    except NothingToCheckpointError:
        return
    assert once.decisions
    assert Pipeline([pass_]).run(once) == once
    totals = account(once)
    assert 0 <= totals.freed_bytes <= sum(target.covered_bytes for target in totals.targets)
