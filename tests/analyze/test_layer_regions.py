"""The regions of real models: exactly what each class of save is, and what shares a storage with what."""

import pytest
import torch
from torch import nn

import memopt
from memopt.analyze.build import build_graph
from memopt.analyze.observe import observe
from memopt.analyze.roles import name_saves
from memopt.ir import Kind, TraceInput
from memopt.ir.region_search import layer_regions, path_in, region_layers
from tests import zoo

HIDDEN_BYTES = zoo.BATCH_SIZE * zoo.SEQ_LENGTH * 32 * 4

ATTENTION_NORM = {"input_layernorm": "attn_norm"}
MLP_NORM = {"post_attention_layernorm": "mlp_norm"}
PROJECTIONS = {f"self_attn.{name}_proj": "qkv_linear" for name in "qkv"} | {"self_attn.o_proj": "attn_proj"}
CORE = {"self_attn": {"", "core_attn"}}
LATENT = {
    "self_attn.q_a_proj": "qkv_linear", "self_attn.q_b_proj": "qkv_linear", "self_attn.kv_b_proj": "qkv_linear",
    "self_attn.kv_a_proj_with_mqa": "qkv_linear", "self_attn.q_a_layernorm": "qk_norm",
    "self_attn.kv_a_layernorm": "qk_norm", "self_attn.o_proj": "attn_proj",
}  # fmt: skip
HEAD_NORMS = {"self_attn.q_norm": "qk_norm", "self_attn.k_norm": "qk_norm"}
MLP = {
    "mlp.gate_proj": "mlp_fc1", "mlp.up_proj": "mlp_fc1", "mlp.act_fn": "mlp_act", "mlp": "mlp_act",
    "mlp.down_proj": "mlp_fc2",
}  # fmt: skip
EXPERTS = {"mlp.gate": "router", "mlp.experts": {"expert_fc1", "moe_act", "moe_fc2"}, "mlp.experts.act_fn": "moe_act"}
SHARED = {
    f"mlp.shared_experts{name}": "shared_expert" for name in ("", ".gate_proj", ".up_proj", ".act_fn", ".down_proj")
}
LLAMA = ATTENTION_NORM | PROJECTIONS | CORE | MLP_NORM
OPT = {
    "self_attn.q_proj": "qkv_linear", "self_attn.k_proj": "qkv_linear", "self_attn.v_proj": "qkv_linear",
    "self_attn": "core_attn", "self_attn.out_proj": "attn_proj", "self_attn_layer_norm": "attn_norm",
    "": {"attn_proj", "mlp_fc2"}, "fc1": "mlp_fc1", "activation_fn": "mlp_act", "fc2": "mlp_fc2",
    "final_layer_norm": "mlp_norm",
}  # fmt: skip

LAYERS = {
    "llama": (LLAMA | MLP,) * 2,
    "qwen3": (LLAMA | HEAD_NORMS | MLP,) * 2,
    "qwen3_moe": (LLAMA | HEAD_NORMS | EXPERTS,) * 2,
    "mixtral": (LLAMA | EXPERTS | {"mlp": "router"},) * 2,
    "gpt_oss": (LLAMA | {"mlp.router": "router", "mlp.experts": EXPERTS["mlp.experts"]},) * 2,
    "deepseek_v3": (
        ATTENTION_NORM | LATENT | CORE | MLP_NORM | MLP,
        ATTENTION_NORM | LATENT | CORE | MLP_NORM | EXPERTS | SHARED,
    ),
    "gpt2": (
        {
            "ln_1": "attn_norm", "attn.c_attn": "qkv_linear", "attn": "core_attn", "attn.c_proj": "attn_proj",
            "attn.resid_dropout": "attn_proj", "ln_2": "mlp_norm", "mlp.c_fc": "mlp_fc1", "mlp.act": "mlp_act",
            "mlp.c_proj": "mlp_fc2", "mlp.dropout": "mlp_fc2",
        },
    ) * 2,
    "opt": (OPT,) * 2,
    "bart": (OPT,) * 2 + (
        OPT | {
            "encoder_attn.q_proj": "qkv_linear", "encoder_attn.k_proj": "qkv_linear",
            "encoder_attn.v_proj": "qkv_linear", "encoder_attn": "core_attn", "encoder_attn.out_proj": "attn_proj",
            "encoder_attn_layer_norm": "attn_norm",
        },
    ) * 2,
    "phi3": (
        ATTENTION_NORM | CORE | MLP_NORM | {
            "self_attn.qkv_proj": "qkv_linear", "self_attn.o_proj": "attn_proj", "resid_attn_dropout": "attn_proj",
            "mlp.gate_up_proj": "mlp_fc1", "mlp.activation_fn": "mlp_act", "mlp": "mlp_act", "mlp.down_proj": "mlp_fc2",
            "resid_mlp_dropout": "mlp_fc2",
        },
    ) * 2,
    "gemma3": (
        LLAMA | HEAD_NORMS | MLP | {"pre_feedforward_layernorm": "mlp_norm", "post_feedforward_layernorm": "mlp_norm"},
    ) * 2,
}  # fmt: skip
"""By model and layer: the region, or regions, of what each module saves."""
ROUTED = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"]


def traced(name, *, dtype=torch.float32, **options):
    return memopt.analyze(zoo.ZOO[name](**options).to(dtype), zoo.batch(name), target_device="cuda")


def observed(name, **options):
    """Return the graph of a forward on real tensors, where fake ones cannot run it."""
    model = zoo.ZOO[name](**options)
    seen = observe(model, (), zoo.batch(name))
    name_saves(seen)
    facts = dict.fromkeys(("dtype", "autocast", "attn_implementation", "target_device"), "")
    return build_graph(model, seen, name=name, trace_input=TraceInput(batch_size=2, seq_length=12, **facts))


def activations(graph, layer):
    """Return (region, path from the layer, tensor) of what a layer saves, weights left out."""
    return [
        (region, path_in(graph, layer, tensor.owner), tensor)
        for region, tensors in layer_regions(graph, layer).items()
        for tensor in tensors
        if tensor.kind is Kind.ACTIVATION
    ]


def regions_by_module(graph, layer):
    found = {}
    for region, path, _ in activations(graph, layer):
        found.setdefault(path, set()).add(region)
    return found


def assert_fits(name, graph):
    for layer, expected in zip(region_layers(graph), LAYERS[name], strict=True):
        sets = {path: {regions} if isinstance(regions, str) else regions for path, regions in expected.items()}
        assert regions_by_module(graph, layer) == sets


def storages(graph, layer, region, *paths):
    """Return the storages that some modules of a layer save in a region."""
    found = [t for r, path, t in activations(graph, layer) if r == region and (not paths or path in paths)]
    return {tensor.storage for tensor in found}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_save_has_the_region_of_its_part(name, attn_implementation, dtype):
    options = {} if name == "gpt_oss" else {"attn_implementation": attn_implementation}  # its sinks have no SDPA
    assert_fits(name, traced(name, dtype=dtype, **options))


@pytest.mark.parametrize("name", ROUTED)
@pytest.mark.parametrize("experts_implementation", ["grouped_mm", "batched_mm"])
def test_fused_experts(name, experts_implementation):
    graph = traced(name, experts_implementation=experts_implementation)
    assert_fits(name, graph)
    for part in graph.parts:
        layer = graph.calls[part.call].fqn.removesuffix(".mlp.experts")
        acts = {tensor.index for tensor in layer_regions(graph, layer)["moe_act"]}
        assert acts >= set(range(part.first_save, part.end_save))
        ((gate_up, _),), ((gated, _),) = part.inputs, part.outputs
        assert gate_up in storages(graph, layer, "moe_act") - storages(graph, layer, "expert_fc1")
        assert gated in storages(graph, layer, "moe_fc2") - storages(graph, layer, "moe_act")


@pytest.mark.parametrize("name", ROUTED)
def test_experts_in_a_loop_on_real_tensors(name):
    graph = observed(name, experts_implementation="eager")
    assert_fits(name, graph)
    for layer in region_layers(graph):
        products = {
            region: sum(
                t.op == "Mm" and path == "mlp.experts" for r, path, t in activations(graph, layer) if r == region
            )
            for region in ("expert_fc1", "moe_act", "moe_fc2")
        }
        assert products["expert_fc1"] == products["moe_fc2"]
        assert products["moe_act"] == 0


@pytest.mark.parametrize("name", LAYERS)
def test_only_rotary_embeddings_are_in_no_region(name):
    graph = traced(name, dtype=torch.bfloat16)
    for layer in region_layers(graph):
        for region, path, tensor in activations(graph, layer):
            if not region:
                assert (path, tensor.op) == ("self_attn", "Mul")
                assert tensor.tensor_bytes < HIDDEN_BYTES / 8


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "mixtral", "gpt_oss", "gemma3", "opt"])
def test_queries_keys_and_values_are_made_of_one_storage(name):
    graph = traced(name, dtype=torch.bfloat16)
    for layer in region_layers(graph):
        saves = [path for region, path, _ in activations(graph, layer) if region == "qkv_linear"]
        assert saves == [f"self_attn.{name}_proj" for name in "qkv"]
        assert len(storages(graph, layer, "qkv_linear")) == 1


def test_latent_attention_projects_twice():
    graph = traced("deepseek_v3")
    for layer in region_layers(graph):
        down = storages(graph, layer, "qkv_linear", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")
        assert len(down) == 1
        assert len(storages(graph, layer, "qkv_linear") - down) == 2


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("gpt_oss", "phi3")])
def test_the_output_of_attention_is_the_input_of_its_projection(name):
    """Except in Phi-3, whose queries lie head by head, as the kernel's output then does: the projection gets a copy."""
    graph = traced(name, dtype=torch.bfloat16)
    for layer in region_layers(graph):
        saves = activations(graph, layer)
        outputs = {t.storage for region, _, t in saves if region == "core_attn" and t.field == "output"}
        products = {t.storage for region, _, t in saves if region == "attn_proj" and t.op in ("Mm", "Addmm")}
        if outputs:  # the kernel that a sliding window falls back to keeps none
            assert outputs == products


def test_a_dense_layer_has_no_experts_and_an_expert_layer_no_dense_mlp():
    dense, routed = (layer_regions(graph, layer) for graph in [traced("deepseek_v3")] for layer in region_layers(graph))
    assert {"mlp_fc1", "mlp_act", "mlp_fc2"} <= dense.keys() - routed.keys()
    assert {"router", "expert_fc1", "moe_act", "moe_fc2", "shared_expert"} <= routed.keys() - dense.keys()


class Layer(nn.Module):
    """Has attention."""

    def __init__(self):
        super().__init__()
        self.attention = nn.Linear(8, 8)

    def forward(self, rows):
        return self.attention(rows).sigmoid()


class Funnel(nn.Module):
    """Has lists of layers in its encoder's list of blocks, and layers of the same class in its decoder."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Module(), nn.Module()
        self.encoder.blocks = nn.ModuleList(nn.ModuleList(Layer() for _ in range(2)) for _ in range(2))
        self.decoder.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, rows):
        for layer in (*self.encoder.blocks[0], *self.encoder.blocks[1], *self.decoder.layers):
            rows = layer(rows)
        return rows


def test_lists_of_layers_are_no_layers_though_a_container_has_them():
    graph = memopt.analyze(Funnel(), torch.randn(4, 8), target_device="cpu")
    blocks = [f"encoder.blocks.{block}.{number}" for block in range(2) for number in range(2)]
    assert set(region_layers(graph)) == {*blocks, "decoder.layers.0", "decoder.layers.1"}
