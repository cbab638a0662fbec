"""The README shows what the commands really print, and its snippets run."""

import re
from pathlib import Path

import pytest

import memopt
from memopt.cli.analyze import app
from memopt.cli.apply import app as apply_app
from memopt.cli.run import run
from tests import models

README = (Path(__file__).parent.parent / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_report_is_the_real_one(capfd):
    assert run(app, ["qwen3-30b-a3b", "--swap", "attention", "--no-predict"]) == 0
    assert f"```text\n{capfd.readouterr().out}```" in README


def test_the_predicted_memory_is_the_real_one(capfd):
    asked = re.search(r"^\$ memopt-analyze (.* --device-memory .*)$", README, re.MULTILINE)[1]
    assert run(app, asked.split()) == 0
    section = re.search(r"^Memory of a .*?(?=\n\nOffload )", capfd.readouterr().out, re.MULTILINE | re.DOTALL)[0]
    assert f"$ memopt-analyze {asked}\n...\n{section}\n..." in README


def test_the_head_of_a_checkpoint_is_the_real_one(capfd):
    asked = "qwen3-30b-a3b --checkpoint selective --seq-length 4096"
    assert run(app, [*asked.split(), "--no-predict"]) == 0
    head = capfd.readouterr().out.partition("\n\n")[0]
    assert f"$ memopt-analyze {asked}\n{head}\n..." in README


def test_the_offload_report_is_the_real_one(capfd):
    """All of it but the sections that the README says it leaves out."""
    asked = "qwen3-30b-a3b --seq-length 4096 --offload core_attn,attn_proj,expert_fc1 --recompute layernorm,moe_act"
    assert f"memopt-analyze {asked}\n" in README
    assert run(app, [*asked.split(), "--no-predict"]) == 0
    head, *sections = re.split(r"\n(?=[A-Z][a-z ]+ ─{5})", capfd.readouterr().out)
    shown = [text for text in sections if text.startswith(("Totals", "Offload", "Recompute", "What stays"))]
    assert "```text\n" + "\n".join([head, *shown]) + "```" in README


def test_the_configuration_of_the_offload_is_applied(capfd, tmp_path):
    path = tmp_path / "memopt.yaml"
    path.write_text(re.search(r"```yaml\n(.*?)```", README, re.DOTALL)[1])
    assert run(apply_app, ["tiny-qwen3-moe", "--config", str(path), "--device", "cpu"]) == 0
    counted = capfd.readouterr().out.partition("all steps")[2].partition("\n\n-")[0]
    assert f"all steps{counted}" in README


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
