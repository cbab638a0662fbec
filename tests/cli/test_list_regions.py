"""memopt-analyze --list-regions: which regions a model has, in every format, and what it cannot be combined with."""

import json

import pytest

from memopt.ir.regions import ALL_REGIONS

LLAMA = ("tiny-llama", "--num-layers", "2", "--list-regions")
DENSE = {"mlp_fc1", "mlp_act", "mlp_fc2"}
ROUTED = {"router", "expert_fc1", "moe_act", "moe_fc2", "fused_group_mlp"}


def listed(command, *arguments):
    code, out, err = command("memopt-analyze", *arguments, "--format", "json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_the_json_keys_are_the_contract(command):
    values = listed(command, *LLAMA)
    assert list(values) == [
        "schema_version", "model", "input", "num_layers", "regions", "in_no_region", "outside_of_layers",
    ]  # fmt: skip
    assert all(list(line) == ["region", "present", "groups", "tensors", "bytes"] for line in values["regions"])
    assert [line["region"] for line in values["regions"]] == list(ALL_REGIONS)


@pytest.mark.parametrize(("model", "absent"), [("tiny-llama", ROUTED | {"qk_norm"}), ("tiny-qwen3-moe", DENSE)])
def test_what_a_model_does_not_have_is_listed_as_absent(command, model, absent):
    values = listed(command, model, "--num-layers", "2", "--list-regions")
    assert {line["region"] for line in values["regions"] if not line["present"]} == absent | {"shared_expert"}
    assert {line["groups"] for line in values["regions"]} == {0, 2}


def test_the_table(command):
    code, out, err = command("memopt-analyze", *LLAMA)
    assert (code, err) == (0, "")
    assert out.startswith("8 regions in 2 layers; the whole model saves ")
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    assert rows["router"].endswith("the model has none")
    assert list(rows)[-2:] == ["in no region", "outside of layers"]


@pytest.mark.parametrize(("format", "start"), [("svg", "<svg"), ("html", "<!DOCTYPE html>"), ("json", "{")])
def test_every_format_into_a_file(command, tmp_path, format, start):
    file = tmp_path / "regions"
    assert command("memopt-analyze", *LLAMA, "--format", format, "--output", file) == (0, "", "")
    text = file.read_text()
    assert text.startswith(start)
    assert "core_attn" in text


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--swap", "attention"], "--swap attention"),
        (["--swap", "none"], "--swap none"),
        (["--checkpoint", "full"], "--checkpoint full"),
        (["--passes", "attention-swap"], "--passes attention-swap"),
        (["--config", "memopt.yaml"], "--config memopt.yaml"),
        (["--save-plan", "plan.json"], "--save-plan plan.json"),
        (["--swap", "attention", "--save-plan", "plan.json"], "--swap attention and --save-plan plan.json"),
    ],
)
def test_it_plans_nothing(fails, tmp_path, monkeypatch, flags, named):
    monkeypatch.chdir(tmp_path)
    code, line = fails("memopt-analyze", *LLAMA, *flags)
    assert code == 2
    assert line == f"--list-regions shows what there is and plans nothing; give it without {named}"
    assert not list(tmp_path.iterdir())
