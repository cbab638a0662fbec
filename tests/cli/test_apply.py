"""memopt-apply: a real training run with a plan equals the run without it, or the command fails."""

import json

import pytest

from memopt.cli import proof
from memopt.runtime.counters import summed

TINY = ("tiny-qwen3-moe", "--num-layers", "2", "--device", "cpu", "--steps", "2")
SAVING = ("--swap", "attention", "--target-device", "cpu", "--no-predict", "--save-plan")
KEYS = [
    "verified",
    "losses_equal",
    "gradients_equal",
    "max_gradient_difference",
    "registered",
    "copied_out",
    "copied_in",
    "predicted_swap_bytes",
    "step_seconds",
    "peak_device_bytes",
    "notes",
]


def as_json(command, *arguments):
    code, out, err = command("memopt-apply", *arguments, "--format", "json")
    return code, json.loads(out), err


def test_the_json_keys_are_the_contract(command):
    code, values, err = as_json(command, *TINY, "--swap", "attention")
    assert (code, err, list(values)) == (0, "", KEYS)
    for key in ("registered", "copied_out", "copied_in"):
        assert list(values[key]) == ["tensors", "bytes"]
    for key in ("step_seconds", "peak_device_bytes"):
        assert list(values[key]) == ["baseline", "planned"]


@pytest.mark.parametrize("name", ["tiny-qwen3-moe", "tiny-llama"])
def test_the_tiny_presets_train_alike(command, name):
    code, values, _ = as_json(command, name, *TINY[1:], "--swap", "attention")
    assert code == 0
    assert values["verified"] and values["losses_equal"] and values["gradients_equal"]
    assert values["max_gradient_difference"] == 0
    assert values["copied_out"]["bytes"] == 2 * values["predicted_swap_bytes"] > 0
    assert values["copied_in"] == values["copied_out"]
    assert values["peak_device_bytes"] == {"baseline": None, "planned": None}


def test_the_text_begins_with_the_verdict(command):
    code, out, err = command("memopt-apply", *TINY, "--swap", "attention")
    assert (code, err) == (0, "")
    assert out.startswith("Verified: with the plan, 2 steps give the same losses and gradients")


def test_a_saved_plan_is_applied_with_its_own_input(command, tmp_path):
    path = tmp_path / "plan.json"
    analyzed = ("tiny-qwen3-moe", "--num-layers", "2", "--batch-size", "1", "--seq-length", "1024")
    command("memopt-analyze", *analyzed, *SAVING, path)
    code, values, _ = as_json(command, *TINY, "--plan", path)
    assert (code, values["verified"]) == (0, True)
    assert not any("another input" in note for note in values["notes"])


def test_a_plan_of_another_shape_still_trains_alike(command, tmp_path):
    path = tmp_path / "plan.json"
    command("memopt-analyze", *TINY[:3], *SAVING, path)
    code, values, _ = as_json(command, *TINY, "--plan", path, "--seq-length", "700")
    assert (code, values["verified"]) == (0, True)
    (note,) = [note for note in values["notes"] if "another input" in note]
    assert "(seq_length: 512, here 700)" in note


def test_the_headline_says_that_predicted_bytes_were_not_compared(command, tmp_path):
    path = tmp_path / "plan.json"
    command("memopt-analyze", *TINY[:3], "--swap", "attention", "--no-predict", "--save-plan", path)
    code, out, _ = command("memopt-apply", *TINY, "--plan", path)
    assert code == 0
    assert "bit for bit (predicted bytes not compared)." in " ".join(out.split())
    assert "target_device: cuda, here cpu" in " ".join(out.split())


def test_nan_in_both_runs_is_no_difference(command):
    code, values, err = as_json(
        command, "tiny-llama", "--checkpoint", "full", "--seq-length", "1", "--steps", "1", "--device", "cpu"
    )
    assert (code, err, values["losses_equal"], values["gradients_equal"]) == (0, "", True, True)
    assert values["max_gradient_difference"] == 0
    assert "the loss is NaN in both runs" in values["notes"]


@pytest.mark.parametrize("asked", [("--swap", "none"), ("--checkpoint", "off")])
def test_a_configuration_that_does_nothing_proves_nothing(command, asked):
    code, values, err = as_json(command, *TINY, *asked)
    why = "the plan swaps and recomputes nothing, so that equal results prove nothing"
    assert (code, err) == (1, f"error: verification failed: {why}\n")
    assert (values["verified"], values["gradients_equal"], values["copied_out"]["bytes"]) == (False, True, 0)
    assert values["notes"][0] == why
    code, out, _ = command("memopt-apply", *TINY, *asked)
    assert (code, out.startswith("NOT VERIFIED: the plan swaps and recomputes nothing")) == (1, True)
    code, values, _ = as_json(command, *TINY, *asked, "--no-verify")
    assert (code, values["verified"], values["notes"][0]) == (0, None, "the plan swaps and recomputes nothing")


def test_no_verify_compares_nothing(command):
    code, values, _ = as_json(command, *TINY, "--swap", "attention", "--no-verify")
    assert (code, values["verified"], values["gradients_equal"]) == (0, None, None)
    assert values["step_seconds"]["baseline"] is None
    assert values["copied_out"]["bytes"] > 0


def test_autocast_and_bfloat16_train_alike(command):
    for options in (("--autocast", "bfloat16"), ("--dtype", "bfloat16")):
        code, values, _ = as_json(command, *TINY, "--seq-length", "1024", "--swap", "attention", *options)
        assert (code, values["verified"]) == (0, True)


def test_weights_of_a_directory_are_trained(command, tmp_path):
    from tests.cli.factories import llama

    llama().save_pretrained(tmp_path)
    code, values, _ = as_json(command, tmp_path, "--swap", "attention", "--device", "cpu", "--steps", "1")
    assert (code, values["verified"]) == (0, True)
    assert values["copied_out"]["bytes"] > 0


def test_a_run_that_differs_fails_and_prints_its_json(command):
    code, values, err = as_json(
        command, "tests.cli.factories:dropout_noise", "--swap", "attention", "--device", "cpu", "--steps", "1"
    )
    assert code == 1
    assert (values["verified"], values["losses_equal"], values["gradients_equal"]) == (False, False, False)
    assert values["max_gradient_difference"] > 0
    assert err.startswith("error: verification failed: losses differ")
    assert len(err.splitlines()) == 1


@pytest.fixture
def idle(monkeypatch):
    """Let a plan be applied by a runtime that does nothing."""

    class Idle:
        def stats(self):
            return summed(())

        def undo(self):
            pass

    monkeypatch.setattr(proof.memopt, "apply", lambda model, plan: Idle())


def test_a_plan_that_copies_nothing_fails(command, idle):
    code, values, err = as_json(command, *TINY, "--swap", "attention")
    assert (code, values["verified"], values["gradients_equal"]) == (1, False, True)
    assert "the plan swaps tensors, and nothing was copied out" in err


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_plan_that_replays_nothing_fails(command, idle, mode):
    code, values, err = as_json(command, *TINY, "--checkpoint", mode)
    assert (code, values["verified"], values["gradients_equal"]) == (1, False, True)
    assert "the plan recomputes 2 regions, and nothing was replayed" in err
    assert list(values) == [*KEYS[:8], "replays", *KEYS[8:]]
    assert list(values["replays"]) == [
        "checkpointed_calls",
        "replayed_calls",
        "kept_results_bytes",
        "predicted_calls",
        "predicted_kept_results_bytes",
    ]
    assert values["replays"]["predicted_calls"] == 2
    assert (values["replays"]["predicted_kept_results_bytes"] > 0) == (mode == "selective")


def test_the_text_of_a_checkpoint_shows_replays_and_no_copies(command, idle):
    _, out, _ = command("memopt-apply", *TINY, "--checkpoint", "full")
    assert out.startswith("NOT VERIFIED: the plan recomputes 2 regions, and nothing was replayed.")
    assert "checkpointed" in out
    assert "copied out" not in out
    assert "prove nothing" not in out


def test_a_profile_is_of_an_accelerator(command, tmp_path):
    code, out, err = command("memopt-apply", *TINY, "--swap", "attention", "--profile-out", tmp_path / "gpu.json")
    assert (code, out) == (2, "")
    assert err == "error: --profile-out measures a CUDA device, and the run is on cpu; leave it out\n"
    assert not list(tmp_path.iterdir())


def test_a_profile_needs_a_file_of_its_own(command, tmp_path):
    path = tmp_path / "both.json"
    code, _, err = command("memopt-apply", *TINY, "--swap", "attention", "--profile-out", path, "--output", path)
    assert code == 2
    assert "--output and --profile-out both name" in err
