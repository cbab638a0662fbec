"""What is foretold of memory, against the device's allocator; and the measured speed of a device."""

import gc
import json
import os
from dataclasses import replace

import pytest
import torch

import memopt
from memopt.ir import DEVICES, find_device
from memopt.predict.measure import measure_device
from tests import models
from tests.runtime.offloads import PARADIGM

CUDA = torch.device("cuda", 0)
SLACK_BYTES = 1 << 16
"""For what is no tensor of the step: states of generators, an event's."""
BATCH = {name: value for name, value in models.batch(seq_length=512).items() if isinstance(value, torch.Tensor)}
CONFIGS = {
    "off": None,
    "swap": {"activation_swap": "attention"},
    "full": {"activation_checkpoint": "full"},
    "selective": {"activation_checkpoint": "selective"},
    "paradigm": PARADIGM,
}


def peak_of_a_step(model, inputs, optimizer, *, before):
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        model(**inputs).loss.backward()
        if optimizer:
            optimizer.step()
        model.zero_grad()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def workspaces_of(model, inputs):
    """Return what cuBLAS is given for this model's products: less than for those that also add a bias."""
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    model(**inputs).loss.backward()
    model.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("optimizer", ["none", "adamw", "adamw-fused"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_allocator_hands_out_what_is_foretold(config, optimizer):
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    model = models.qwen3_moe().to(CUDA, torch.bfloat16)
    inputs = {name: tensor.to(CUDA) for name, tensor in BATCH.items()} | {"use_cache": False}
    device = replace(DEVICES["h200"], library_bytes=workspaces_of(model, inputs))
    plan = memopt.plan(memopt.analyze(model, inputs), config)
    foretold = memopt.predict(plan, model, inputs, optimizer=optimizer, device=device)
    if config:
        memopt.apply(model, plan)
    trained = torch.optim.AdamW(model.parameters(), fused=optimizer == "adamw-fused" or None)
    peak = peak_of_a_step(model, inputs, trained if optimizer != "none" else None, before=before)
    assert foretold.planned_low_bytes - SLACK_BYTES <= peak <= foretold.planned_high_bytes + SLACK_BYTES


def test_a_device_measures_as_fast_as_its_profile_says(tmp_path):
    if "H200" not in torch.cuda.get_device_name():
        pytest.skip("there is a measured profile of the H200 only")
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("other tests use the device meanwhile")
    found, known = measure_device(CUDA), DEVICES["h200"]
    path = tmp_path / "device.json"
    path.write_text(json.dumps(found.as_dict()))
    assert find_device(str(path)) == found
    assert found.library_bytes == known.library_bytes
    for name in (
        "half_flops",
        "single_flops",
        "bytes_per_second",
        "copy_out_bytes_per_second",
        "copy_in_bytes_per_second",
    ):
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=0.2), name
