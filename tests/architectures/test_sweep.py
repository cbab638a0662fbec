"""The sweep over all architectures runs on a few of each kind, and survives what a class may do to it."""

import os
import time

import pytest
import torch

import memopt
from tests import zoo
from tests.architectures import sweep, trial
from tests.architectures.sweeps import Sweep
from tests.architectures.trial import EXACT, Outcome, Row, try_class

NO_SELF_ATTN, NO_REGION = "found no self_attn", "its layers have parts of other names: norm, mixer"
REFUSED = {
    "LlamaForCausalLM": {},
    "GPT2LMHeadModel": {"swap": NO_SELF_ATTN},
    "BertLMHeadModel": {"swap": NO_SELF_ATTN},
    "BartForCausalLM": {},
    "Gemma3nForCausalLM": {},  # its last layers borrow keys and values
    "Qwen3MoeForCausalLM": {},
    "DeepseekV4ForCausalLM": {},
    "LongcatFlashForCausalLM": {},  # a loop over experts, and two attentions a layer
    "JetMoeForCausalLM": {"swap": NO_SELF_ATTN},  # experts in attention, by lists of lengths
    "DbrxForCausalLM": {"swap": NO_SELF_ATTN},
    "XmodForCausalLM": {"swap": NO_SELF_ATTN},  # masks that follow from the inputs
    "Qwen3_5ForCausalLM": {},
    "FalconH1ForCausalLM": {},
    "JambaForCausalLM": {},  # attention among state spaces
    "Mamba2ForCausalLM": {"swap": NO_SELF_ATTN, "fine-grained": NO_REGION},
    "T5Gemma2ForConditionalGeneration": {},  # masks made by vmap
    "LEDForConditionalGeneration": {},  # a word that attends to all
    "EncoderDecoderModel": {"swap": NO_SELF_ATTN},
    "VoxtralForConditionalGeneration": {},
    "VibeVoiceAsrForConditionalGeneration": {},
    "BertForMaskedLM": {"swap": NO_SELF_ATTN},
    "FunnelForMaskedLM": {"swap": NO_SELF_ATTN},  # lists of layers in a list
    "ModernVBertForMaskedLM": {},
    "Qwen2_5_VLForConditionalGeneration": {},  # windows of images, and positions that follow from a grid
    "Ernie4_5_VLMoeForConditionalGeneration": {},  # offsets put together from nothing
    "HunYuanVLForConditionalGeneration": {},  # convolutions of views
    "UdopForConditionalGeneration": {"swap": NO_SELF_ATTN},  # masks of the shape of an image
    "LightOnOcrForConditionalGeneration": {},  # images cut by lengths that are tensors
    "Gemma4ForConditionalGeneration": {},
    "MllamaForConditionalGeneration": {},  # attends to images
    "VisionEncoderDecoderModel": {"swap": NO_SELF_ATTN},
}
"""Classes of all kinds; by mode what memopt says where it refuses, all else being exact."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_is_traced_as_it_runs_and_trains_alike_in_every_mode(name):
    outcomes = try_class(name).outcomes()
    refused = REFUSED[name]
    assert {key: outcome.word for key, outcome in outcomes.items()} == {
        key: "refused" if key in refused else EXACT for key in outcomes
    }
    assert all(why in outcomes[mode].why for mode, why in refused.items())


def test_a_wrong_gradient_and_a_wrong_trace_are_seen(monkeypatch):
    apply, analyze = memopt.apply, memopt.analyze

    def spoiled(model, plan):
        with torch.no_grad():
            next(model.parameters()).mul_(1.0001)
        return apply(model, plan)

    def shortened(model, inputs):
        return analyze(
            model, {key: value[:, 1:] if key == "labels" else value[:, :-1] for key, value in inputs.items()}
        )

    monkeypatch.setattr(trial, "batch", lambda model: zoo.words())
    monkeypatch.setattr(memopt, "apply", spoiled)
    monkeypatch.setattr(memopt, "analyze", shortened)
    row = try_class("LlamaForCausalLM")
    assert row.trace.word == "differs"
    assert {outcome.word for mode, outcome in row.modes.items() if mode != trial.MEMORY} == {"WRONG"}


def test_a_plan_that_does_nothing_says_why():
    row = try_class("PI0ForConditionalGeneration")
    assert (row.trace.word, row.modes["full"].word) == (EXACT, "none")
    assert "nothing was moved or replayed: layers whose cache holds keys already" in row.modes["full"].why


def test_a_family_has_all_its_classes_once():
    families = {family: sweep.classes_of(family) for family in sweep.FAMILIES}
    for names in families.values():
        assert len(names) == len(set(names)) >= 20
    assert "MambaForCausalLM" in families["state-space"]
    assert REFUSED.keys() <= set().union(*families.values())


@pytest.mark.parametrize("act, word", [(lambda: os._exit(3), "CRASH"), (lambda: time.sleep(60), "timeout")])
def test_a_class_that_ends_its_process_or_does_not_end_is_a_row(monkeypatch, act, word):
    monkeypatch.setattr(sweep, "try_class", lambda name: act())
    assert sweep.row_in_process("Some", timeout_s=2).plain.word == word


def test_a_trial_that_raises_is_a_row(monkeypatch):
    monkeypatch.setattr(sweep, "try_class", lambda name: 1 / 0)
    row = sweep.row_in_process("Some")
    assert row.plain.word == "CRASH"
    assert "ZeroDivisionError: division by zero" in row.plain.why


def test_the_page_adds_up_and_gives_each_reason_once():
    refusal = "nothing in {}; name a part"
    rows = [
        Row(name, Outcome(EXACT), Outcome(EXACT), {"swap": Outcome("refused", refusal.format(name))})
        for name in ("B", "A")
    ]
    other = Row("C", Outcome("not runnable", "ImportError: no kernel"))
    page = sweep.page(Sweep("2", "5", {"one": rows, "other": [other, rows[0]]}))
    everything, one, rest = page.split("\n## ")[:3]
    assert "| 3 classes | plain | trace | swap |" in everything
    assert "| exact | 2 | 2 | 0 |" in everything
    assert "| refused | 0 | 0 | 2 |" in everything
    assert "| exact | 2 | 2 | 0 |" in one
    assert "| exact | 1 | 1 | 0 |" in rest
    assert page.index("| A | exact | exact | refused |") < page.index("| B | exact | exact | refused |")
    assert "**refused**: nothing in CLASS; name a part\n\n: A (swap), B (swap)" in page
    assert "**not runnable**: ImportError: no kernel\n\n: C (plain)" in page


def test_the_page_says_what_is_other_with_another_version(tmp_path):
    def row(name, word="exact", why=""):
        return Row(name, Outcome(EXACT), Outcome(EXACT), {"swap": Outcome(word, why)})

    here = Sweep("2", "5", {"one": [row("Same"), row("Other"), row("Gone")]})
    there = Sweep("2", "6", {"one": [row("New"), row("Same"), row("Other", "refused", "nothing in Other")]})
    there.write(tmp_path / "rows.json")
    read = Sweep.read(tmp_path / "rows.json")
    assert read == there
    above, other = sweep.page(here, beside=read).split("\n## With transformers 6\n")
    assert "| Other | exact | exact | exact |" in above
    assert "| 3 classes | plain | trace | swap |" in other
    assert "1 classes are new:" in other
    assert "| New | exact | exact | exact |" in other
    assert "| Other | exact | exact | refused |" in other
    assert "**refused**: nothing in CLASS\n\n: Other (swap)" in other
    assert "1 classes are gone: Gone." in other
    assert "| Same |" not in other
