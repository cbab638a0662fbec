"""Offload and recompute on the command line: what the flags mean, alone, together and beside a file."""

import json

import memopt
from memopt.ir import Action, RegionKey

TINY = ("--batch-size", "1", "--seq-length", "16", "--num-layers", "2", "--target-device", "cpu")


def planned(command, tmp_path, *arguments, model="tiny-llama"):
    path = tmp_path / "plan.json"
    code, out, err = command(
        "memopt-analyze", model, *TINY, "--format", "json", "--no-predict", "--save-plan", path, *arguments
    )
    assert (code, err) == (0, "")
    return memopt.load_plan(path), json.loads(out)


def written(tmp_path, text):
    path = tmp_path / "memopt.yaml"
    path.write_text(text)
    return path


def test_flags_ask_for_both(command, tmp_path):
    plan, report = planned(command, tmp_path, "--offload", "core_attn, attn_proj", "--recompute", "layernorm,mlp_act")
    assert {key.region for key, d in plan.decisions.items() if d.policy == "offload"} == {"core_attn", "attn_proj"}
    recomputed = {key.fqn.rpartition(".")[2] for key, d in plan.decisions.items() if d.action is Action.RECOMPUTE}
    assert recomputed == {"input_layernorm", "post_attention_layernorm", "act_fn"}
    assert plan.prefetch_chain == ("model.layers.0", "model.layers.1")
    assert [row["name"] for row in report["offload"]["recompute"]] == ["layernorm", "mlp_act"]


def test_a_flag_outranks_the_modules_of_the_file_and_leaves_its_other_keys(command, tmp_path):
    text = "activation_offload: {modules: [mlp_fc1], margin: 0, min_tensor_elements: 16}\nrecompute: {modules: [mlp]}\n"
    path = written(tmp_path, text)
    plan, report = planned(command, tmp_path, "--config", path, "--offload", "core_attn", "--recompute", "layernorm")
    assert {key.region for key, d in plan.decisions.items() if d.policy == "offload"} == {"core_attn"}
    assert (plan.offload.margin, plan.offload.min_tensor_elements) == (0, 16)
    assert report["swap"]["bytes_per_step"] == report["offload"]["moved_bytes"] > 0


def test_a_pattern_reaches_any_module(command, tmp_path):
    plan, _ = planned(command, tmp_path, "--offload", "module:model.layers.*.mlp")
    assert list(plan.decisions) == [RegionKey(f"model.layers.{n}.mlp", "module:") for n in range(2)]


def test_passes_ask_for_the_same(command, tmp_path):
    passes = "recompute-parts:modules=layernorm,fine-grained-offload:modules=core_attn+attn_proj,prefetch-chain"
    flags = ("--offload", "core_attn,attn_proj", "--recompute", "layernorm")
    assert planned(command, tmp_path, "--passes", passes) == planned(command, tmp_path, *flags)


def test_what_the_model_lacks_is_named(fails, command, tmp_path):
    code, line = fails("memopt-analyze", "tiny-llama", *TINY, "--offload", "expert_fc1,router")
    assert (code, line) == (
        2,
        "activation_offload found no expert_fc1 or router in LlamaForCausalLM; it has: attn_norm, qkv_linear, core_attn, "
        "attn_proj, mlp_norm, mlp_fc1, mlp_act, mlp_fc2",
    )
    _, report = planned(command, tmp_path, "--offload", "expert_fc1,core_attn")
    assert report["notes"] == ["activation_offload: no layer of the model saves anything in expert_fc1"]


def test_a_pattern_that_matches_nothing(fails):
    code, line = fails("memopt-analyze", "tiny-llama", *TINY, "--offload", "module:model.layer.0.mlp")
    assert code == 2
    assert line.startswith(
        "pattern 'module:model.layer.0.mlp' matches no module in which something is saved for backward; "
    )
    assert "did you mean 'module:model.layers.0.mlp'" in line


def test_the_experts_activation(command, tmp_path):
    plan, _ = planned(command, tmp_path, "--recompute", "moe_act", model="tiny-qwen3-moe")
    assert list(plan.decisions) == [RegionKey(f"model.layers.{n}.mlp.experts", "moe_act") for n in range(2)]


def test_help_teaches_the_names(command):
    code, out, _ = command("memopt-analyze", "--help")
    text = " ".join(out.replace("│", " ").split())
    assert code == 0
    for name in ("core_attn", "fused_group_mlp", "module:PATTERN", "layernorm", "shared_expert"):
        assert name in text
