"""The README shows what the commands really print, and its snippets run."""

import re
from pathlib import Path

import pytest

import memopt
from memopt.cli.analyze import app
from memopt.cli.run import run
from tests import models

README = (Path(__file__).parent.parent / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_report_is_the_real_one(capfd):
    assert run(app, ["qwen3-30b-a3b", "--swap", "attention"]) == 0
    assert f"```text\n{capfd.readouterr().out}```" in README


def test_the_head_of_a_checkpoint_is_the_real_one(capfd):
    asked = "qwen3-30b-a3b --checkpoint selective --seq-length 4096"
    assert run(app, asked.split()) == 0
    head = capfd.readouterr().out.partition("\n\n")[0]
    assert f"$ memopt-analyze {asked}\n{head}\n..." in README


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_every_snippet_runs(number):
    """Each on a model of its own; they are parts of a training script, and take its names for granted."""
    model, inputs = models.qwen3_moe(num_hidden_layers=2), models.batch(seq_length=256)
    attention, next_attention = (layer.self_attn for layer in models.qwen3_moe(num_hidden_layers=2).model.layers)
    names = {
        "memopt": memopt, "model": model, "inputs": inputs, "graph": memopt.analyze(model, inputs), "module": attention,
        "one_module": memopt.swap_wrapper(models.Attention()), "next_module": memopt.swap_wrapper(next_attention),
    }  # fmt: skip
    exec(SNIPPETS[number], names)
