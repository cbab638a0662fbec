"""The parts of a layer that are checkpointed one by one."""

import pytest
import transformers
from torch import nn

from memopt.ir import layer_containers, layer_parts
from tests.ir.trees import fake, graph_of_model, on_meta


def parts(children, *, compiled=False, properties=()):
    """Return the parts of one layer with those children."""
    layer = fake("Layer", {name: nn.Linear(8, 8) if child is None else child for name, child in children.items()})
    for name, path in properties:
        setattr(type(layer), name, property(lambda self, path=path: self.get_submodule(path)))
    graph = graph_of_model(fake("Model", {"layers": nn.ModuleList([layer])}))
    return [(role, fqn.removeprefix("layers.0.")) for role, fqn in layer_parts(graph, "layers.0", compiled=compiled)]


def named(*names):
    return dict.fromkeys(names)


LLAMA = named("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")


def test_the_parts_of_a_usual_layer():
    assert parts(LLAMA) == [
        ("mlp", "mlp"),
        ("attention", "self_attn"),
        ("norm 1", "input_layernorm"),
        ("norm 2", "post_attention_layernorm"),
    ]


def test_compiled_leaves_the_norms():
    assert parts(LLAMA, compiled=True) == [("mlp", "mlp"), ("attention", "self_attn")]
    assert parts(named("input_layernorm", "mlp_moe_gen"), compiled=True) == []


@pytest.mark.parametrize(
    ("role", "names"),
    [
        ("mlp", ("mlp", "feed_forward", "ffn")),
        ("attention", ("self_attn", "attention", "attn", "linear_attn")),
        ("norm 1", ("input_layernorm", "attention_norm", "layer_norm1", "norm1")),
        ("norm 2", ("post_attention_layernorm", "ffn_norm", "layer_norm2", "norm2")),
    ],
)
def test_the_first_name_that_is_there_counts(role, names):
    for first in range(len(names)):
        assert parts(named(*reversed(names[first:]))) == [(role, names[first])]


def test_the_extra_parts_stand_beside_each_other():
    extra = ("mlp_moe_gen", "input_layernorm_moe_gen", "post_attention_layernorm_moe_gen")
    assert parts(named(*extra, "mlp")) == [("mlp", "mlp"), *(("extra", name) for name in extra)]


def test_a_property_is_no_child():
    assert parts(
        named("block.mlp", "linear_attn"), properties=[("mlp", "block.mlp"), ("self_attn", "linear_attn")]
    ) == [("attention", "linear_attn")]


def test_a_module_with_two_names_is_one_part():
    norm, attn = nn.LayerNorm(8), nn.Linear(8, 8)
    shared = {"attn": attn, "self_attn": attn, "input_layernorm": norm, "post_attention_layernorm": norm}
    assert parts(shared) == [("attention", "attn"), ("norm 1", "input_layernorm")]


def test_nothing_matches():
    assert parts(named("norm", "mixer")) == []
    assert parts({}) == []


def test_only_direct_children_count():
    assert parts(named("block.mlp", "block.self_attn")) == []


@pytest.mark.parametrize(
    ("class_name", "options", "expected"),
    [
        ("GPT2LMHeadModel", {"n_layer": 1}, ["mlp", "attn"]),
        ("Qwen3MoeForCausalLM", {"num_hidden_layers": 1}, list(LLAMA)),
        ("Qwen3NextForCausalLM", {"num_hidden_layers": 1}, ["linear_attn", "mlp", *list(LLAMA)[2:]]),
        ("NemotronHForCausalLM", {"layers_block_type": ["mamba"]}, []),
    ],
)
def test_layers_of_transformers(class_name, options, expected):
    cls = getattr(transformers, class_name)
    graph = graph_of_model(on_meta(lambda: cls(cls.config_class(**options))))
    layer = layer_containers(graph)[0].layers[0]
    found = [fqn.removeprefix(f"{layer}.") for _, fqn in layer_parts(graph, layer, compiled=False)]
    assert sorted(found) == sorted(expected)
