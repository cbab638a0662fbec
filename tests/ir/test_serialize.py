"""Plans survive a file, and a file that is no plan is named."""

import json
from dataclasses import replace

import pytest

from memopt.errors import UnreadableFileError
from memopt.ir import Family, FunctionCall, PartCall, load_plan, plan_from_json, plan_to_json, save_plan
from tests.builders import QWEN, mib_save, plan_of, qwen_layers

PRODUCT = FunctionCall(
    family=Family.MM,
    call=3,
    first_save=1,
    end_save=3,
    outputs=((7, 4096),),
    statistics=((8, 16), (9, 16)),
    flops=1 << 40,
    keepable=True,
)
ACTIVATION = PartCall(
    region="moe_act", call=3, first_save=1, end_save=2, inputs=((7, 4096),), outputs=((8, 2048), (9, 16))
)


def full_plan():
    """Return a plan of two layers whose graph knows inputs, outputs, operations, functions and parts too."""
    plan = plan_of(*qwen_layers(2), build=QWEN)
    known = {"inputs": ((40, 8192), (41, 16)), "outputs": ((42, 4096), (43, 8)), "flops": 1 << 41}
    calls = tuple(replace(call, **known) for call in plan.graph.calls)
    plan = plan.note("a note")
    functions = (PRODUCT, replace(PRODUCT, keepable=False))
    parts = (ACTIVATION, replace(ACTIVATION, inputs=()))
    facts = {"calls": calls, "functions": functions, "parts": parts, "checkpointed": ("model.layers.0",)}
    return replace(plan, graph=replace(plan.graph, **facts))


def test_a_plan_survives_a_file(tmp_path):
    plan = full_plan()
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UnreadableFileError, match=r"plan '.*plan\.json' cannot be read: No such file"):
        load_plan(tmp_path / "plan.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema_version": 5}'])
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(UnreadableFileError, match="plan 'text' cannot be read: ") as error:
        plan_from_json(text)
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("key", "value"), [("schema_version", 4), ("extra", 1), ("decisions", [["a", "", {}]])])
def test_a_wrong_key_is_named(key, value):
    document = json.loads(plan_to_json(plan_of(mib_save("model.self_attn"))))
    with pytest.raises(UnreadableFileError, match=key):
        plan_from_json(json.dumps({**document, key: value}))


def contradiction(*path, value):
    """Return the text of a good plan of two layers with one value of it changed."""
    document = json.loads(plan_to_json(full_plan()))
    *parents, key = path
    place = document
    for parent in parents:
        place = place[parent]
    place[key] = value(place[key])
    return json.dumps(document)


def is_now(new):
    return lambda old: new


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["prefetch_chain"], is_now(["model.elsewhere"]), "prefetch_chain: prefetch chain names 'model.elsewhere'"),
        (
            ["prefetch_chain"],
            lambda chain: chain[::-1],
            "prefetch_chain: prefetch chain has 'model.layers.1.self_attn'",
        ),
        (["decisions", 0, 1], is_now("rope"), "decisions: decision on 'model.layers.0.self_attn:rope': no region"),
        (["decisions", 0, 0], is_now("model.no"), "decisions: decision on 'model.no': the model has no such module"),
        (["decisions"], lambda old: [*old, old[0]], "decisions.2: 'model.layers.0.self_attn' has a decision already"),
        (["graph", "calls", 3, "parent"], is_now(3), "graph.calls.3.parent: 3 is no earlier call"),
        (["graph", "calls", 3, "parent"], is_now(-1), "graph.calls.3.parent: -1 is no earlier call"),
        (["graph", "calls", 3, "end_save"], is_now(99), "graph.calls.3.end_save: saves 0 to 99 are not within the 36"),
        (["graph", "calls", 3, "fqn"], is_now("x"), "graph.calls.3.fqn: 'x' is no module"),
        (["graph", "calls", 3, "index"], is_now(4), "graph.calls.3.index: 4 stands at 3"),
        (["graph", "calls", 3, "inputs", 1], is_now([2, -16]), "graph.calls.3.inputs.1: -16 is negative"),
        (["graph", "calls", 3, "outputs", 0], is_now([-2, 16]), "graph.calls.3.outputs.0: -2 is negative"),
        (["graph", "calls", 3, "flops"], is_now(-1), "graph.calls.3.flops: -1 is negative"),
        (["graph", "functions", 1, "call"], is_now(99), "graph.functions.1.call: 99 is no call"),
        (["graph", "functions", 1, "call"], is_now(-1), "graph.functions.1.call: -1 is no call"),
        (["graph", "functions", 1, "end_save"], is_now(0), "graph.functions.1.end_save: saves 1 to 0 are not within"),
        (["graph", "functions", 1, "outputs"], is_now([[-7, 1]]), "graph.functions.1.outputs.0: -7 is negative"),
        (["graph", "functions", 1, "statistics", 1], is_now([9, -1]), "graph.functions.1.statistics.1: -1 is negative"),
        (["graph", "functions", 1, "flops"], is_now(-1), "graph.functions.1.flops: -1 is negative"),
        (["graph", "functions", 1, "family"], is_now("gemm"), "graph.functions.1.family: Input should be 'mm'"),
        (["graph", "parts", 1, "region"], is_now("rope"), "graph.parts.1.region: 'rope' is no region"),
        (["graph", "parts", 1, "call"], is_now(99), "graph.parts.1.call: 99 is no call"),
        (["graph", "parts", 1, "end_save"], is_now(0), "graph.parts.1.end_save: saves 1 to 0 are not within"),
        (["graph", "parts", 1, "inputs"], is_now([[7, -1]]), "graph.parts.1.inputs.0: -1 is negative"),
        (["graph", "parts", 1, "outputs", 1], is_now([-9, 1]), "graph.parts.1.outputs.1: -9 is negative"),
        (["graph", "saved", 5, "index"], is_now(6), "graph.saved.5.index: 6 stands at 5"),
        (["graph", "saved", 5, "call"], is_now(99), "graph.saved.5.call: 99 is no call"),
        (["graph", "saved", 5, "owner"], is_now("x"), "graph.saved.5.owner: 'x' is no module"),
        (["graph", "saved", 5, "storage_bytes"], is_now(-1), "graph.saved.5.storage_bytes: -1 is negative"),
        (["graph", "saved", 5, "shape"], is_now([2, -1]), "graph.saved.5.shape: -1 is negative"),
        (["graph", "model", "parameter_bytes"], is_now(-1), "graph.model.parameter_bytes: -1 is negative"),
        (["graph", "modules"], is_now([]), "graph.modules: the first is not the root"),
        (["graph", "modules", 2, "fqns"], is_now([]), "graph.modules.2.fqns: the first is not the module's fqn"),
        (["graph", "checkpointed"], is_now(["x"]), "graph.checkpointed.0: 'x' is no module"),
        (["graph", "flows"], is_now([[0, 99]]), "graph.flows.0: [0, 99] is no pair of calls"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused_and_the_key_named(path, value, message):
    with pytest.raises(UnreadableFileError) as error:
        plan_from_json(contradiction(*path, value=value), path="plan.json")
    assert str(error.value).startswith(f"plan 'plan.json' cannot be read: {message}")
