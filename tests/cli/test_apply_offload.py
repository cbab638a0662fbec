"""memopt-apply with regions offloaded and parts recomputed: exact, and what is copied is what the plan foretold."""

import json

import pytest

TINY = ("tiny-qwen3-moe", "--num-layers", "2", "--seq-length", "64", "--device", "cpu", "--steps", "2")
SMALL = "min_tensor_elements: 1, margin: 0"
PARADIGM = f"""
activation_offload: {{modules: [core_attn, attn_proj, expert_fc1], {SMALL}}}
recompute: {{modules: [layernorm, moe_act]}}
"""
NOTHING = (
    "nothing is offloaded: most of what could be is under 1,048,576 elements, and a smaller min_tensor_elements "
    "offloads that"
)


def written(tmp_path, text):
    path = tmp_path / "memopt.yaml"
    path.write_text(text)
    return path


def as_json(command, *arguments):
    code, out, err = command("memopt-apply", *arguments, "--format", "json")
    return code, json.loads(out), err


def assert_exact(values, steps=2):
    assert (values["verified"], values["losses_equal"], values["gradients_equal"]) == (True, True, True)
    assert values["max_gradient_difference"] == 0
    assert values["copied_out"]["bytes"] == values["registered"]["bytes"] == steps * values["predicted_swap_bytes"]
    if replays := values.get("replays"):
        assert replays["replayed_calls"] == replays["checkpointed_calls"] == steps * replays["predicted_calls"]


@pytest.mark.parametrize("model", ["tiny-qwen3-moe"])
def test_the_flags_alone(command, model):
    """A batch that is large enough: nothing is set but the regions."""
    modules = "core_attn,attn_proj" + (",mlp_fc1" if model == "tiny-llama" else ",expert_fc1")
    flags = (*TINY[1:3], *TINY[5:], "--batch-size", "32", "--seq-length", "256")
    code, values, err = as_json(command, model, *flags, "--offload", modules, "--recompute", "layernorm")
    assert (code, err) == (0, "")
    assert_exact(values)
    assert values["predicted_swap_bytes"] > 1 << 20
    assert values["replays"]["predicted_calls"] > 0


@pytest.mark.parametrize("settings", ["", "fraction: 0.75", "max_inflight: 0", "max_inflight: 1, fraction: 0.5"])
def test_the_settings_of_a_file(command, tmp_path, settings):
    text = PARADIGM.replace(SMALL, ", ".join(filter(None, (SMALL, settings))))
    code, values, err = as_json(command, *TINY, "--config", written(tmp_path, text))
    assert (code, err) == (0, "")
    assert_exact(values)
    assert values["predicted_swap_bytes"] > 0


@pytest.mark.parametrize(
    "modules",
    ["fused_group_mlp", "attn_norm, mlp_norm, router", "'module:model.layers.*.mlp'", "'module:*.self_attn', moe_fc2"],
)
def test_regions_and_patterns(command, tmp_path, modules):
    text = f"activation_offload: {{modules: [{modules}], {SMALL}}}"
    code, values, err = as_json(command, *TINY, "--config", written(tmp_path, text))
    assert (code, err) == (0, "")
    assert_exact(values)
    assert values["predicted_swap_bytes"] > 0
    assert "replays" not in values


@pytest.mark.parametrize("options", [("--autocast", "bfloat16"), ("--dtype", "bfloat16")], ids=["autocast", "dtype"])
def test_in_bfloat16(command, tmp_path, options):
    code, values, err = as_json(command, *TINY, "--config", written(tmp_path, PARADIGM), *options)
    assert (code, err) == (0, "")
    assert (values["verified"], values["max_gradient_difference"]) == (True, 0)
    assert values["copied_out"]["bytes"] > 0


def test_whole_modules_are_recomputed(command):
    code, values, _ = as_json(command, *TINY, "--recompute", "moe")
    assert code == 0
    assert_exact(values)
    assert values["replays"]["predicted_calls"] == 2


def test_a_saved_plan(command, tmp_path):
    config, path = written(tmp_path, PARADIGM), tmp_path / "plan.json"
    asked = (*TINY[:5], "--config", config, "--target-device", "cpu", "--no-predict", "--save-plan", path)
    assert command("memopt-analyze", *asked)[0] == 0
    code, values, err = as_json(command, *TINY, "--plan", path)
    assert (code, err) == (0, "")
    assert_exact(values)
    assert values["predicted_swap_bytes"] > 0


def test_the_text_shows_copies_and_replays(command, tmp_path):
    code, out, err = command("memopt-apply", *TINY, "--config", written(tmp_path, PARADIGM))
    assert (code, err) == (0, "")
    assert out.startswith("Verified: with the plan, 2 steps give the same losses and gradients as without it, bit for")
    rows = {line[:18].strip(): line.split() for line in out.splitlines()}
    assert rows["copied out"][-2:] == rows["registered"][-2:]
    assert rows["replayed"][-1] == rows["checkpointed"][-1] == "20"


def test_where_nothing_is_large_enough_that_is_said(command):
    """The threshold is Megatron's, and tiny models have nothing above it."""
    code, out, err = command("memopt-apply", *TINY, "--offload", "core_attn")
    assert code == 1
    assert " ".join(out.split()).startswith(f"NOT VERIFIED: {NOTHING}, so that equal results prove nothing.")
    assert err == f"error: verification failed: {NOTHING}, so that equal results prove nothing\n"


def test_where_only_the_recomputed_parts_do_something_that_is_said(command):
    code, values, err = as_json(command, *TINY, "--offload", "core_attn", "--recompute", "layernorm")
    assert (code, err) == (0, "")
    assert_exact(values)
    assert NOTHING in values["notes"]
    asked = (*TINY[:5], "--offload", "core_attn", "--recompute", "layernorm", "--no-predict")
    code, out, _ = command("memopt-analyze", *asked)
    assert code == 0
    assert f"- {NOTHING}" in " ".join(out.split())


def test_an_impossible_request_trains_nothing(fails, tmp_path):
    for text, said in (
        ("activation_offload: {modules: [attn_proj]}", "attn_proj needs core_attn"),
        ("activation_offload: {modules: [fused_group_mlp, moe_act]}", "moe_act included; drop one or the other"),
        ("activation_offload: {modules: [core_attn], fraction: 1.01}", "legal: a number from 0 to 1"),
        ("activation_offload: {modules: [core_attn], max_inflight: -1}", "legal: null for no limit"),
        ("activation_offload: {modules: []}", "legal: one or more of attn_norm"),
        ("activation_offload: {modules: [core_atn, foo]}", "does not know 'core_atn', 'foo'"),
        ("{activation_offload: {modules: [moe_fc2]}, recompute: {modules: [moe]}}", "leaves nothing saved to offload"),
        ("{activation_offload: {modules: [core_attn]}, activation_checkpoint: full}", "recomputes whole layers"),
        ("{activation_offload: {modules: [core_attn]}, activation_swap: attention}", "activation_swap='attention'"),
        ("activation_offload: {modules: [mlp_fc1]}", "found no mlp_fc1 in Qwen3MoeForCausalLM; it has: attn_norm"),
        ("activation_offload: {modules: ['module:*.attn']}", "pattern 'module:*.attn' matches no module"),
    ):
        code, line = fails("memopt-apply", *TINY, "--config", written(tmp_path, text))
        assert code == 2
        assert said in line
