"""The report of a plan that offloads regions and recomputes parts, and that its numbers add up."""

import json

from memopt.ir import Plan, account
from memopt.passes import FineGrainedOffload, Pipeline, PrefetchChain, RecomputeParts
from memopt.report import plan_report, plan_summary, rendered
from tests.builders import Build, graph_of, mib_save, moe_layers

SMALL = {"min_tensor_elements": 1000}


def planned(*passes, num_layers=4):
    saves, build = moe_layers(num_layers, name="hand-made", notes=("experts were traced with balanced routing",))
    return Pipeline([*passes, PrefetchChain()]).run(Plan(graph=graph_of(*saves, mib_save("lm_head", 5), build=build)))


def both(num_layers=4):
    offload = FineGrainedOffload(modules=("core_attn", "attn_proj", "expert_fc1", "mlp_fc1"), fraction=0.8, **SMALL)
    return planned(RecomputeParts(modules=("layernorm", "moe_act")), offload, num_layers=num_layers)


def test_offload_with_recompute(golden):
    assert rendered(plan_report(both())) == golden


def test_offload_with_recompute_as_json(golden_json):
    assert json.dumps(plan_summary(both(2)), indent=2) + "\n" == golden_json


def test_offload_of_patterns(golden):
    offload = FineGrainedOffload(
        modules=("module:*.self_attn", "module:*.experts"), pp_rank=1, pp_rank_delta_bytes=1, **SMALL
    )
    assert rendered(plan_report(planned(offload))) == golden


def test_recompute_alone(golden):
    assert rendered(plan_report(planned(RecomputeParts(modules=("layernorm",))))) == golden


def test_recompute_of_whole_modules_beside_offload(golden):
    offload = FineGrainedOffload(modules=("core_attn", "attn_proj"), margin=0, **SMALL)
    assert rendered(plan_report(planned(RecomputeParts(modules=("moe",)), offload))) == golden


def test_all_is_margin(golden):
    graph = graph_of(mib_save("model.layers.0.self_attn.o_proj", 2), build=Build(classes={"layers": "ModuleList"}))
    offload = FineGrainedOffload(modules=("core_attn", "attn_proj"), **SMALL)
    assert rendered(plan_report(Pipeline([offload]).run(Plan(graph=graph)))) == golden


def test_the_rows_add_up():
    plan = both()
    values, totals = plan_summary(plan)["offload"], account(plan)
    for key in ("num_tensors", "moved_bytes", "duplicate_bytes"):
        assert sum(row[key] for row in values["regions"]) == sum(row[key] for row in values["groups"]) == values[key]
    assert sum(values["stays"].values()) == values["saved_bytes"] - values["net_freed_bytes"]
    assert values["net_freed_bytes"] == totals.net_freed_bytes
