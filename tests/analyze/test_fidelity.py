"""The fake trace lists what a real run saves, entry by entry."""

from dataclasses import replace

import pytest
import torch

import memopt
from memopt.analyze.build import build_graph
from memopt.analyze.observe import observe
from memopt.analyze.roles import name_saves
from tests import models


def real_saved(model, inputs, autocast):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast == "bfloat16"):
        seen = observe(model, (), inputs)
        name_saves(seen)
    fake_input = memopt.analyze(model, inputs, target_device="cpu").input
    return build_graph(model, seen, name="real", trace_input=fake_input)


def uncounted(calls):
    """Return calls without their operations, which only a fake trace counts."""
    return tuple(replace(call, flops=0) for call in calls)


def padded(batch):
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :100] = 0
    return {**batch, "attention_mask": mask}


def attended(batch):
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def packed(batch):
    rows, length = batch["input_ids"].shape
    return {**batch, "position_ids": torch.arange(length // 2).repeat(rows, 2)}


def sound(batch):
    return {"input_features": torch.randn(2, 8, 128), "labels": batch["labels"][:, :32]}


SMALL = models.batch(seq_length=128)
CASES = {
    "qwen3-moe": (models.qwen3_moe, {}, SMALL, "none"),
    "qwen3-moe eager": (models.qwen3_moe, {"attn_implementation": "eager"}, SMALL, "none"),
    "qwen3-moe aux loss": (models.qwen3_moe, {"output_router_logits": True}, SMALL, "none"),
    "qwen3-moe aux loss padded": (models.qwen3_moe, {"output_router_logits": True}, padded(SMALL), "none"),
    "llama": (models.llama, {}, SMALL, "none"),
    "llama dropout": (models.llama, {"attention_dropout": 0.1}, SMALL, "none"),
    "llama padded": (models.llama, {}, padded(SMALL), "none"),
    "llama attended": (models.llama, {}, attended(SMALL), "none"),
    "llama packed": (models.llama, {}, packed(SMALL), "none"),
    "llama autocast": (models.llama, {}, SMALL, "bfloat16"),
    "llama with cache": (models.llama, {}, {**SMALL, "use_cache": True}, "none"),
    "gpt2": (models.gpt2, {}, SMALL, "none"),
    "opt, which asks chance whether to drop a layer": (models.opt, {}, SMALL, "none"),
    "opt padded": (models.opt, {}, padded(SMALL), "none"),
    "bart": (models.bart, {"encoder_layerdrop": 0.1}, SMALL, "none"),
    "whisper": (models.whisper, {}, sound(SMALL), "none"),
}


@pytest.mark.parametrize("case", CASES)
def test_fake_trace_equals_a_real_run(case):
    build, options, inputs, autocast = CASES[case]
    model = build(**options)
    fake = memopt.analyze(model, inputs, autocast=autocast, target_device="cpu")
    real = real_saved(model, inputs, autocast)
    assert [c.fqn for c in fake.calls] == [c.fqn for c in real.calls]
    assert fake.saved == real.saved
    assert fake.held == real.held
    assert uncounted(fake.calls) == real.calls
    assert uncounted(fake.functions) == real.functions
    assert len(fake.saved) > 40
    assert fake.input.attn_implementation == options.get("attn_implementation", "sdpa")


def test_statistics_of_a_norm_after_a_layer_under_autocast_are_of_the_real_dtype():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen = observe(model, (torch.randn(2, 8),), {})
        name_saves(seen)
    fake = memopt.analyze(model, torch.randn(2, 8), autocast="bfloat16", target_device="cpu")
    assert fake.saved == build_graph(model, seen, name="real", trace_input=fake.input).saved


def test_trace_of_a_bfloat16_model_equals_a_real_run():
    model = models.qwen3_moe().bfloat16()
    fake = memopt.analyze(model, SMALL, target_device="cpu")
    assert fake.saved == real_saved(model, SMALL, "none").saved
