"""The regions of whole graphs: what counts as a layer, as a group, and how bytes add up."""

from dataclasses import replace

import pytest

from memopt.ir import Kind, ModuleCall
from memopt.ir.region_search import layer_regions, outermost_calls, path_in, region_layers, region_summary
from memopt.ir.regions import ALL_REGIONS
from tests.builders import MIB, Build, graph_of, mib_save

LIST = {"layers": "ModuleList"}


def layer(number, *, fqn="model.layers"):
    name = f"{fqn}.{number}"
    return [
        mib_save(f"{name}.input_layernorm", 1, node="PowBackward0", storage=f"{name} in"),
        mib_save(f"{name}.self_attn.q_proj", 1, storage=f"{name} normed"),
        mib_save(f"{name}.self_attn.q_proj", 4, storage=f"{name} weight", kind=Kind.PARAMETER),
        mib_save(f"{name}.self_attn.k_proj", 1, storage=f"{name} normed"),
        mib_save(f"{name}.self_attn", 2, node="MulBackward0", storage="rotary"),
        mib_save(f"{name}.self_attn", 3, node="SoftmaxBackward0", storage=f"{name} mixed"),
        mib_save(f"{name}.self_attn.o_proj", 3, storage=f"{name} mixed"),
    ]


def experts(number):
    name = f"model.layers.{number}.mlp.experts"
    return [
        mib_save(name, 1, node="GroupedMmBackward0", storage=f"{name} gathered"),
        mib_save(name, 2, node="SiluBackward0", storage=f"{name} up"),
        mib_save(name, 1, node="GroupedMmBackward0", storage=f"{name} gated"),
        mib_save(name, 1, node="MulBackward0", storage=f"{name} gathered"),
    ]


def model(*saves, **options):
    return graph_of(*saves, build=Build(classes=LIST, **options))


def lines(graph):
    return {
        line.region: (line.num_groups, line.num_tensors, line.num_bytes / MIB)
        for line in region_summary(graph).regions
        if line.num_tensors
    }


def test_a_summary_counts_layers_storages_and_bytes_of_activations():
    graph = model(*layer(0), *layer(1), mib_save("lm_head", 5), mib_save("lm_head", 7, kind=Kind.PARAMETER))
    assert lines(graph) == {
        "attn_norm": (2, 2, 2),
        "qkv_linear": (2, 2, 2),
        "core_attn": (2, 2, 6),
        "attn_proj": (2, 2, 6),
    }
    summary = region_summary(graph)
    assert summary.num_layers == 2
    assert tuple(line.region for line in summary.regions) == ALL_REGIONS
    assert (summary.unnamed.num_groups, summary.unnamed.num_tensors, summary.unnamed.num_bytes) == (2, 1, 2 * MIB)
    assert (summary.outside.num_tensors, summary.outside.num_bytes) == (1, 5 * MIB)


def test_the_fused_block_counts_a_storage_of_its_parts_once():
    found = lines(model(*layer(0), *layer(1), *experts(1)))
    assert {region: found[region] for region in ("expert_fc1", "moe_act", "moe_fc2", "fused_group_mlp")} == {
        "expert_fc1": (1, 1, 1),
        "moe_act": (1, 1, 2),
        "moe_fc2": (1, 2, 2),
        "fused_group_mlp": (1, 3, 4),
    }


@pytest.mark.parametrize("kind", [Kind.PARAMETER, Kind.BUFFER, Kind.PARAMETER_CAST])
def test_a_layer_that_saves_only_weights_in_a_region_is_no_group(kind):
    graph = model(mib_save("model.layers.0.mlp.up_proj"), mib_save("model.layers.1.mlp.up_proj", kind=kind))
    assert lines(graph) == {"mlp_fc1": (1, 1, 1)}


def test_a_layer_that_saves_nothing_is_left_out():
    graph = model(*layer(0), *layer(1))
    first = graph.calls_of("model.layers.0")[0]
    calls = tuple(
        replace(call, first_save=0, end_save=0) if call.fqn == "model.layers.1" else call for call in graph.calls
    )
    assert first.end_save
    assert region_layers(replace(graph, calls=calls)) == ("model.layers.0",)


def test_a_model_without_layers_has_no_regions():
    graph = graph_of(mib_save("body.self_attn.q_proj"), build=Build(class_name="Body"))
    assert region_layers(graph) == ()
    summary = region_summary(graph)
    assert summary.num_layers == 0
    assert not any(line.num_tensors for line in (*summary.regions, summary.unnamed))
    assert summary.outside.num_bytes == MIB


def test_both_towers_have_layers():
    graph = graph_of(
        *layer(0, fqn="encoder.layers"),
        *layer(0, fqn="decoder.layers"),
        build=Build(class_name="Translator", classes=LIST),
    )
    assert set(region_layers(graph)) == {"encoder.layers.0", "decoder.layers.0"}


def test_the_saves_of_a_layer_by_region():
    regions = layer_regions(model(*layer(0), *layer(1)), "model.layers.1")
    assert {region: [tensor.index for tensor in tensors] for region, tensors in regions.items()} == {
        "attn_norm": [7],
        "qkv_linear": [8, 9, 10],
        "": [11],
        "core_attn": [12],
        "attn_proj": [13],
    }


def test_a_claimed_module_is_a_region():
    regions = layer_regions(model(*layer(0)), "model.layers.0", ("self_attn.q_proj",))
    assert [tensor.index for tensor in regions["module:self_attn.q_proj"]] == [1, 2]
    assert [tensor.index for tensor in regions["qkv_linear"]] == [3]


def test_a_call_within_a_call_of_the_same_layer_is_part_of_it():
    graph = model(*layer(0))
    (call,) = graph.calls_of("model.layers.0")
    within = ModuleCall(index=len(graph.calls), fqn=call.fqn, parent=call.index, first_save=1, end_save=4)
    graph = replace(graph, calls=(*graph.calls, within))
    assert outermost_calls(graph, call.fqn) == (call,)
    assert sum(map(len, layer_regions(graph, call.fqn).values())) == 7


def test_every_call_of_a_layer_begins_anew():
    graph = model(*layer(0), *layer(1))
    again = [replace(t, owner=t.owner.replace("layers.1", "layers.0")) for t in graph.saved[7:]]
    calls = tuple(replace(call, fqn=call.fqn.replace("layers.1", "layers.0")) for call in graph.calls)
    graph = replace(graph, saved=(*graph.saved[:7], *again), calls=calls)
    regions = layer_regions(graph, "model.layers.0")
    assert [tensor.index for tensor in regions[""]] == [4, 11]  # rotary embeddings, not the rest of the first call
    assert [tensor.index for tensor in regions["core_attn"]] == [5, 12]


def test_a_shared_module_is_known_by_its_name_in_the_layer():
    one, other = "model.layers.0", "model.layers.1"
    names = {f"{one}.self_attn.{p}_proj": (f"{other}.self_attn.{p}_proj",) for p in "qk"}
    graph = model(*layer(0), *layer(1), aliases=names)
    assert path_in(graph, other, f"{one}.self_attn.q_proj") == "self_attn.q_proj"
    assert path_in(graph, one, f"{one}.self_attn.q_proj") == "self_attn.q_proj"
    assert path_in(graph, one, one) == ""


def test_a_module_that_is_not_in_the_layer_keeps_its_name():
    graph = model(*layer(0), *layer(1))
    assert path_in(graph, "model.layers.1", "model.layers.0.self_attn") == "model.layers.0.self_attn"
