"""memopt-analyze on real models: the report in every format, and the plan as a file."""

import json
import subprocess
import sys

import pytest

from memopt.ir import load_plan

TINY = ("tiny-qwen3-moe", "--num-layers", "2", "--swap", "attention")

KEYS = {
    "": ["schema_version", "model", "input", "targets", "swap", "prefetch_chain", "saved", "notes"],
    "model": ["name", "class", "num_parameters", "parameter_bytes"],
    "input": ["batch_size", "seq_length", "dtype", "autocast", "attn_implementation", "target_device"],
    "swap": ["covered_bytes", "bytes_per_step", "freed_bytes", "num_tensors"],
    "saved": ["total_bytes", "parameter_bytes", "activation_bytes"],
}
TARGET_KEYS = [
    "fqn",
    "class",
    "action",
    "covered_bytes",
    "swap_bytes",
    "freed_bytes",
    "num_covered",
    "kept",
    "tensors",
]
TENSOR_KEYS = ["role", "op", "shape", "dtype", "storage_bytes", "action", "reason"]


def as_json(command, *arguments):
    code, out, err = command("memopt-analyze", *arguments, "--no-predict", "--format", "json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_the_json_keys_are_the_contract(command):
    summary = as_json(command, *TINY)
    assert {key: list(summary[key] if key else summary) for key in KEYS} == KEYS
    assert [list(target) for target in summary["targets"]] == [TARGET_KEYS] * 2
    assert all(list(tensor) == TENSOR_KEYS for target in summary["targets"] for tensor in target["tensors"])


def test_qwen3_30b_a3b_covers_49_mib_a_layer(command):
    summary = as_json(command, "qwen3-30b-a3b", "--swap", "attention", "--seq-length", 1024, "--dtype", "bfloat16")
    assert [target["fqn"] for target in summary["targets"]] == [f"model.layers.{n}.self_attn" for n in range(48)]
    assert {target["covered_bytes"] for target in summary["targets"]} == {51_380_224}
    assert summary["model"]["num_parameters"] == 30_532_122_624


@pytest.mark.parametrize("name", ["tiny-qwen3-moe", "tiny-llama"])
@pytest.mark.parametrize("target_device", ["cpu", "cuda"])
def test_the_tiny_presets_cover_at_least_four_tensors_a_target(command, name, target_device):
    summary = as_json(command, name, "--swap", "attention", "--target-device", target_device)
    assert len(summary["targets"]) == 4
    assert min(target["num_covered"] for target in summary["targets"]) >= 4


@pytest.mark.parametrize("name", ["qwen3-235b-a22b", "qwen3-8b", "llama-3.1-8b"])
def test_every_preset_can_be_planned(command, name):
    summary = as_json(command, name, "--swap", "attention", "--num-layers", 2)
    assert summary["model"]["name"] == name
    assert (summary["input"]["batch_size"], summary["input"]["seq_length"]) == (1, 1024)
    assert summary["input"]["dtype"] == "bfloat16"
    assert len(summary["targets"]) == 2


def test_without_swap_it_says_what_is_saved(command):
    code, out, err = command("memopt-analyze", *TINY[:3], "--swap", "none", "--no-predict")
    assert (code, err) == (0, "")
    assert out.startswith("Nothing is changed: ")
    assert command("memopt-analyze", *TINY[:3], "--checkpoint", "off", "--no-predict") == (0, out, "")
    summary = as_json(command, *TINY[:3])
    assert (summary["targets"], summary["prefetch_chain"]) == ([], [])
    assert summary["saved"]["activation_bytes"] > 0


def test_passes_can_be_named_one_by_one(command):
    summary = as_json(command, *TINY[:3], "--passes", "attention-swap")
    assert (len(summary["targets"]), summary["prefetch_chain"]) == (2, [])


def test_the_flag_outranks_the_file(command, tmp_path):
    (tmp_path / "memopt.yaml").write_text("activation_swap: attention\n")
    asked = (*TINY[:3], "--config", tmp_path / "memopt.yaml")
    assert len(as_json(command, *asked)["targets"]) == 2
    assert as_json(command, *asked, "--swap", "none")["targets"] == []


RECOMPUTE_KEYS = [
    "dropped_bytes",
    "freed_bytes",
    "input_bytes",
    "result_bytes",
    "added_bytes",
    "net_freed_bytes",
    "replay_bytes",
    "flops",
    "repeated_flops",
]
RECOMPUTED_TARGET_KEYS = [
    "route",
    "policy",
    "why",
    "num_calls",
    "input_bytes",
    "results",
    "last_bytes",
    "replay_bytes",
    "flops",
    "repeated_flops",
]


def test_the_json_keys_of_a_checkpoint_are_the_contract(command):
    summary = as_json(command, *TINY[:3], "--checkpoint", "selective")
    assert list(summary) == [*KEYS[""][:5], "recompute", *KEYS[""][5:]]
    assert list(summary["recompute"]) == RECOMPUTE_KEYS
    for target in summary["targets"]:
        assert list(target) == [*TARGET_KEYS, "recompute"]
        assert list(target["recompute"]) == RECOMPUTED_TARGET_KEYS
        assert all(list(kept) == ["family", "num_calls", "bytes"] for kept in target["recompute"]["results"])
        assert all(list(tensor) == TENSOR_KEYS for tensor in target["tensors"])


def test_full_checkpointing_takes_the_native_route(command):
    summary = as_json(command, *TINY[:3], "--checkpoint", "full", "--target-device", "cpu")
    targets, sums = summary["targets"], summary["recompute"]
    assert [target["fqn"] for target in targets] == ["model.layers.0", "model.layers.1"]
    assert {(t["action"], t["recompute"]["route"], t["recompute"]["policy"]) for t in targets} == {
        ("recompute", "native", "full")
    }
    assert summary["prefetch_chain"] == []
    assert sums["result_bytes"] == 0
    assert 0 < sums["net_freed_bytes"] < sums["freed_bytes"] < summary["saved"]["activation_bytes"]
    assert 0.5 * sums["flops"] < sums["repeated_flops"] < sums["flops"]


def test_selective_checkpointing_keeps_expensive_results(command):
    full, selective = (as_json(command, *TINY[:3], "--checkpoint", mode) for mode in ("full", "selective"))
    for target in selective["targets"]:
        assert (target["recompute"]["route"], target["recompute"]["policy"]) == ("layer", "selective")
        # of q, k, v, o, the router and the experts' two, in this order, every other; no fused kernel takes float32
        # attention here, and in the place of the last result stays what is saved after it
        families = {kept["family"]: kept["num_calls"] for kept in target["recompute"]["results"]}
        assert families == {"mm": 3}
        assert target["recompute"]["last_bytes"] > 0
    assert selective["recompute"]["repeated_flops"] < full["recompute"]["repeated_flops"]
    assert selective["recompute"]["net_freed_bytes"] < full["recompute"]["net_freed_bytes"]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_the_text_of_a_checkpoint_begins_with_what_it_frees(command, mode):
    code, out, err = command("memopt-analyze", *TINY[:3], "--checkpoint", mode, "--no-predict")
    assert (code, err) == (0, "")
    assert out.startswith(f"{mode.capitalize()} checkpointing frees ")
    assert "model.layers.0-1 (x2)  Qwen3MoeDecoderLayer\n  recompute by the " in out
    assert "Prefetch chain" not in out
    assert "Copy time" not in out


def test_enable_compile_in_the_file_plans_for_the_compiler(command, tmp_path):
    (tmp_path / "memopt.yaml").write_text("activation_checkpoint: full\nenable_compile: true\n")
    path = tmp_path / "plan.json"
    as_json(command, *TINY[:3], "--config", tmp_path / "memopt.yaml", "--save-plan", path)
    decisions = load_plan(path).decisions
    assert {key.fqn.rpartition(".")[2] for key in decisions} == {"self_attn", "mlp"}
    assert all(decision.route == "compile" and decision.compiles for decision in decisions.values())


def test_the_checkpoint_flag_outranks_the_file(command, tmp_path):
    (tmp_path / "memopt.yaml").write_text("activation_checkpoint: full\n")
    asked = (*TINY[:3], "--config", tmp_path / "memopt.yaml")
    assert "recompute" in as_json(command, *asked)
    assert as_json(command, *asked, "--checkpoint", "off")["targets"] == []
    policies = {t["recompute"]["policy"] for t in as_json(command, *asked, "--checkpoint", "selective")["targets"]}
    assert policies == {"selective"}


def test_passes_take_options(command):
    summary = as_json(command, *TINY[:3], "--passes", "activation-checkpoint:mode=selective:compiles=true")
    assert {target["recompute"]["route"] for target in summary["targets"]} == {"compile"}


def test_a_partly_frozen_model_goes_by_parts_and_says_which_layers_save_nothing(command):
    summary = as_json(command, "tests.cli.factories:frozen", "--checkpoint", "full", "--seq-length", 64)
    assert [target["fqn"] for target in summary["targets"]] == ["model.layers.2.mlp"]
    assert summary["targets"][0]["recompute"]["why"] == "mlp, because model.layers.0 is not fully trainable"
    assert "2 of 3 layers save nothing for backward and stay as they are" in summary["notes"]


@pytest.mark.parametrize(
    ("format", "start"), [("text", "Attention swap frees"), ("svg", "<svg"), ("html", "<!DOCTYPE")]
)
def test_every_format_to_a_file(command, tmp_path, format, start):
    code, out, err = command(
        "memopt-analyze", *TINY, "--no-predict", "--format", format, "--output", tmp_path / "report"
    )
    assert (code, out, err) == (0, "", "")
    assert (tmp_path / "report").read_text().startswith(start)


def test_the_plan_is_saved_beside_the_report(command, tmp_path):
    summary = as_json(command, *TINY, "--save-plan", tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    assert list(plan.prefetch_chain) == summary["prefetch_chain"]


def test_a_config_file_and_a_directory_are_models(command, tmp_path):
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64, dtype="float32", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path / "small")
    for path in (tmp_path / "small", tmp_path / "small" / "config.json"):
        summary = as_json(command, path, "--seq-length", 16)
        assert (summary["model"]["name"], summary["model"]["class"]) == ("small", "LlamaForCausalLM")
        assert summary["input"]["dtype"] == "float32"


def test_a_factory_is_a_model(command):
    summary = as_json(command, "tests.cli.factories:llama", "--swap", "attention", "--seq-length", 1024)
    assert summary["model"]["class"] == "LlamaForCausalLM"
    assert any("not an accepted model" in note for note in summary["notes"])


def test_help_teaches(command):
    for name in ("memopt-analyze", "memopt-apply"):
        code, out, err = command(name, "--help")
        assert (code, err) == (0, "")
        for part in (
            "Examples",
            "tiny-qwen3-moe",
            "attention",
            "Exit codes",
            "--attn-implementation",
            "--checkpoint",
            "selective",
        ):
            assert part in out


def test_version(command):
    import memopt

    assert command("memopt-analyze", "--version") == (0, f"{memopt.__version__}\n", "")


def test_a_closed_pipe_is_quiet():
    script = f"import sys; from memopt.cli.analyze import main; sys.argv[1:] = {[*TINY, '--no-predict']}; main()"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""
