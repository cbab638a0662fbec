"""memopt-apply with checkpointing: the counters are what the plan foretold, and training is as before."""

import json

import pytest

TINY = ("tiny-qwen3-moe", "--num-layers", "2", "--device", "cpu", "--steps", "2")


def as_json(command, *arguments):
    code, out, err = command("memopt-apply", *arguments, "--format", "json")
    return code, json.loads(out), err


def assert_as_foretold(values, num_regions, *, keeps, steps=2):
    """Every call is predicted, checkpointed and replayed, and what results it keeps is predicted to the byte."""
    assert (values["verified"], values["losses_equal"], values["gradients_equal"]) == (True, True, True)
    assert values["max_gradient_difference"] == 0
    replays = values["replays"]
    assert replays["predicted_calls"] == num_regions
    assert replays["checkpointed_calls"] == replays["replayed_calls"] == steps * num_regions
    assert replays["kept_results_bytes"] == steps * replays["predicted_kept_results_bytes"]
    assert (replays["kept_results_bytes"] > 0) == keeps
    assert values["copied_out"]["bytes"] == 0


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("name", ["tiny-qwen3-moe", "tiny-llama"])
def test_the_tiny_presets_train_alike(command, name, mode):
    code, values, err = as_json(command, name, *TINY[1:], "--checkpoint", mode)
    assert (code, err) == (0, "")
    assert_as_foretold(values, 2, keeps=mode == "selective")


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_the_text_begins_with_the_verdict_and_shows_the_replays(command, mode):
    code, out, err = command("memopt-apply", *TINY, "--checkpoint", mode)
    assert (code, err) == (0, "")
    assert out.startswith("Verified: with the plan, 2 steps give the same losses and gradients")
    rows = {words[0]: words[-1] for line in out.splitlines() if (words := line.split())}
    assert rows["replayed"] == rows["checkpointed"] == "4"
    assert rows["kept"] == rows["predicted"]


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("options", [("--autocast", "bfloat16"), ("--dtype", "bfloat16")], ids=["autocast", "dtype"])
def test_in_bfloat16_they_train_alike_too(command, mode, options):
    code, values, _ = as_json(command, *TINY, "--checkpoint", mode, *options)
    assert code == 0
    assert_as_foretold(values, 2, keeps=mode == "selective")


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_saved_plan_is_applied(command, tmp_path, mode):
    path = tmp_path / "plan.json"
    analyzed = (*TINY[:3], "--checkpoint", mode, "--target-device", "cpu", "--no-predict", "--save-plan", path)
    code, _, err = command("memopt-analyze", *analyzed)
    assert (code, err) == (0, "")
    code, values, err = as_json(command, *TINY, "--plan", path)
    assert (code, err) == (0, "")
    assert_as_foretold(values, 2, keeps=mode == "selective")


@pytest.mark.parametrize("text", ["activation_checkpoint: {mode: full}", "activation_checkpoint: full"])
def test_a_configuration_names_the_mode(command, tmp_path, text):
    path = tmp_path / "memopt.yaml"
    path.write_text(text)
    code, values, _ = as_json(command, *TINY, "--config", path)
    assert code == 0
    assert_as_foretold(values, 2, keeps=False)
    code, values, _ = as_json(command, *TINY, "--config", path, "--checkpoint", "selective")  # the flag outranks it
    assert code == 0
    assert_as_foretold(values, 2, keeps=True)


def test_what_is_to_be_compiled_runs_eagerly_here_part_by_part(command, tmp_path):
    path = tmp_path / "memopt.yaml"
    path.write_text("activation_checkpoint: {mode: full}\nenable_compile: true\n")
    code, values, _ = as_json(command, *TINY, "--config", path)
    assert code == 0
    assert_as_foretold(values, 4, keeps=False)


@pytest.mark.parametrize("name", ["tests.cli.factories:frozen", "tests.cli.factories:gpt2"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_frozen_layers_and_dropout(command, name, mode):
    code, values, _ = as_json(
        command, name, "--checkpoint", mode, "--device", "cpu", "--steps", "2", "--seq-length", "64"
    )
    assert (code, values["verified"], values["max_gradient_difference"]) == (0, True, 0)
    assert values["replays"]["replayed_calls"] == 2 * values["replays"]["predicted_calls"] > 0


@pytest.mark.parametrize("name", ["memopt-analyze", "memopt-apply"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_swap_and_checkpoint_exclude_each_other(fails, name, mode):
    assert fails(name, "tiny-qwen3-moe", "--swap", "attention", "--checkpoint", mode) == (
        2,
        "activation_swap='attention' is incompatible with activation checkpointing; drop one of the two",
    )


@pytest.mark.parametrize("name", ["memopt-analyze", "memopt-apply"])
def test_illegal_modes(command, fails, tmp_path, name):
    code, out, err = command(name, "tiny-qwen3-moe", "--checkpoint", "some")
    assert (code, out) == (2, "")
    assert "some" in err and all(mode in err for mode in ("off", "full", "selective"))
    path = tmp_path / "memopt.yaml"
    for text in ("activation_checkpoint: {mode: some}", "activation_checkpoint: some", "activation_checkpoint: true"):
        path.write_text(text)
        code, line = fails(name, "tiny-qwen3-moe", "--config", path)
        assert code == 2
        assert "activation_checkpoint=" in line and "legal: off, full, selective" in line
