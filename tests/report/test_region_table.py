"""The table of regions as it is read."""

import json

from memopt.ir import Kind
from memopt.report import regions_report, regions_values, rendered
from tests.builders import QWEN, Build, graph_of, mib_save, qwen_layers


def experts(layer):
    name = f"model.layers.{layer}.mlp.experts"
    return [
        mib_save(f"model.layers.{layer}.mlp.gate", 4, storage=f"{layer} normed"),
        mib_save(name, 32, node="GroupedMmBackward0"),
        mib_save(f"{name}.act_fn", 24, node="SiluBackward0", storage=f"{layer} up"),
        mib_save(name, 12, node="MulBackward0"),
        mib_save(name, 12, node="GroupedMmBackward0"),
    ]


def graph():
    layers = [save for layer in range(2) for save in (*qwen_layers(2)[18 * layer : 18 * (layer + 1)], *experts(layer))]
    build = Build(name=QWEN.name, dtype=QWEN.dtype, classes={**QWEN.classes, "layers": "ModuleList"})
    return graph_of(*layers, mib_save("model.norm", 2), mib_save("lm_head", 9, kind=Kind.PARAMETER), build=build)


def test_two_layers_of_experts(golden):
    assert rendered(regions_report(graph())) == golden


def test_two_layers_of_experts_as_json(golden_json):
    assert json.dumps(regions_values(graph()), indent=2) + "\n" == golden_json


def test_a_model_without_layers(golden):
    body = graph_of(mib_save("body.self_attn.q_proj"), build=Build(class_name="Body"))
    assert rendered(regions_report(body)) == golden
