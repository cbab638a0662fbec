"""Pipelines of two processes, microbatches and virtual stages in the orders of torch's own schedules."""

import pytest

from tests.distributed import pipelines
from tests.distributed.processes import start

SETTINGS = {"modules": pipelines.REGIONS, "min_tensor_elements": 1, "margin": "auto"}
DELTA = 10_000


def works(schedule):
    delta = {"activation_offload": SETTINGS | {"pp_rank_delta_bytes": DELTA}}
    if schedule == "1f1b":
        yield {"name": "llama", "schedule": schedule, "config": {"activation_offload": SETTINGS}, "delta_bytes": 0}
        yield {"name": "llama", "schedule": schedule, "config": delta, "delta_bytes": DELTA}
    light = {"recompute": {"modules": "layernorm,moe_act"}}
    experts = {
        "activation_offload": delta["activation_offload"] | {"modules": "core_attn,attn_proj,expert_fc1", "margin": 0}
    }
    yield {"name": "qwen3_moe", "schedule": schedule, "config": experts | light, "delta_bytes": DELTA}


@pytest.mark.parametrize("schedule", pipelines.SCHEDULES)
def test_each_stage_is_exact_and_moves_its_plan_for_every_microbatch(schedule):
    """Faults: chunks told apart by which is current, a number of microbatches that is learned, a delta not kept."""
    start(pipelines.enter, 2, list(works(schedule)))
