"""memopt-analyze predicts the memory of a step: its flags, its formats, and what it says when it cannot."""

import json
import re

import pytest

from memopt.errors import PredictionError, ReplayError
from memopt.ir import DEVICES, save_device
from memopt.units import GIB
from tests.report.test_memory import MEMORY_KEYS

TINY = ("tiny-llama", "--num-layers", "1", "--batch-size", "1", "--seq-length", "64")
SMALL = ("tiny-llama", "--num-layers", "2", "--batch-size", "1", "--seq-length", "512", "--swap", "attention")


def memory(command, *arguments):
    code, out, err = command("memopt-analyze", *arguments, "--format", "json")
    assert (code, err) == (0, "")
    return json.loads(out)["memory"]


def test_the_text_of_a_swap(command, golden):
    code, out, err = command("memopt-analyze", *SMALL, "--device-memory", "100MiB")
    assert (code, err) == (0, "")
    section = re.search(r"^Memory of a training step.*?(?=\n\nTargets )", out, re.MULTILINE | re.DOTALL)[0]
    assert section + "\n" == golden
    assert "Copy time" not in out


def test_the_json_of_a_swap(command, golden_json):
    values = memory(command, *SMALL)
    assert list(values) == MEMORY_KEYS
    assert json.dumps(values, indent=2) + "\n" == golden_json


def test_without_a_plan_there_is_one_peak(command):
    values = memory(command, *TINY, "--device-memory", "80GiB")
    assert values["planned_peak_low_bytes"] == values["planned_peak_high_bytes"] == values["baseline_peak_bytes"] > 0
    assert (values["fits"], values["short_bytes"]) == (True, {"baseline": 0, "planned": 0})
    assert (values["optimizer"], values["grad_in_backward"], values["device_memory_bytes"]) == (
        "adamw-fused",
        False,
        80 * GIB,
    )


def test_the_optimizer_and_what_becomes_of_gradients(command):
    usual = memory(command, *TINY)
    plain = memory(command, *TINY, "--optimizer", "none", "--grad-in-backward")
    assert usual["optimizer_bytes"] > 2 * usual["parameter_bytes"] * 0.99
    assert plain["optimizer_bytes"] == 0
    assert 0 < plain["gradient_bytes"] < usual["gradient_bytes"]
    assert (plain["optimizer"], plain["grad_in_backward"]) == ("none", True)


def test_a_device_profile_by_name_and_by_file(command, tmp_path):
    save_device(DEVICES["rtx4090"], tmp_path / "mine.json")
    values = [memory(command, *TINY, "--device-profile", name) for name in ("RTX4090", tmp_path / "mine.json")]
    assert values[0] == values[1]
    assert values[0]["device"] == {"name": "rtx4090", "is_measured": False}


def test_no_predict_says_nothing_of_it(command):
    code, out, _ = command("memopt-analyze", *TINY, "--no-predict", "--format", "json")
    assert (code, "memory" in json.loads(out)) == (0, False)


def test_the_dtype_and_a_model_of_a_factory(command):
    asked = ("tests.cli.factories:llama", "--seq-length", 64)
    single, half = (memory(command, *asked, "--dtype", dtype) for dtype in ("float32", "bfloat16"))
    assert 1.9 < single["parameter_bytes"] / half["parameter_bytes"] <= 2


def test_a_page_with_a_picture(command, tmp_path):
    page = tmp_path / "page.html"
    assert command("memopt-analyze", *TINY, "--format", "html", "--output", page) == (0, "", "")
    text = page.read_text()
    assert "plotly-graph-div" in text
    assert "memopt tiny-llama: memory of a training step, predicted" in text
    assert not re.search(r"<script[^>]*\bsrc=|<link\b", text)


def test_without_plotly_there_is_no_picture(command, fails, monkeypatch, tmp_path):
    monkeypatch.setattr("memopt.report.picture.find_spec", lambda name: None)
    html = (*TINY, "--format", "html")
    code, line = fails("memopt-analyze", *html)
    assert code == 2
    assert line.endswith("pip install 'plotly>=6', or give --no-predict or another --format")
    assert command("memopt-analyze", *html, "--no-predict", "--output", tmp_path / "page.html")[0] == 0
    assert command("memopt-analyze", *TINY)[0] == 0


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (PredictionError("LlamaForCausalLM", RuntimeError("no\nway")),
         "- a training step of LlamaForCausalLM cannot be predicted: RuntimeError: no; leave the prediction out"),
        (ReplayError("model.layers.0", "saves less"),
         "- the memory of a step is not predicted: the replay of 'model.layers.0' saves less"),
    ],
)  # fmt: skip
def test_a_prediction_that_fails_is_a_note(command, monkeypatch, tmp_path, error, note):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr("memopt.cli.predicting.PredictionRequest.predicted", fail)
    code, out, err = command("memopt-analyze", *TINY, "--save-plan", tmp_path / "plan.json")
    assert (code, err) == (0, "")
    assert note in " ".join(out.split())
    assert "predicted" not in (tmp_path / "plan.json").read_text()
    code, out, _ = command("memopt-analyze", *TINY, "--format", "json")
    assert (code, "memory" in json.loads(out)) == (0, False)


FLAGS = [
    (["--optimizer", "sgd"], "--optimizer sgd"),
    (["--grad-in-backward"], "--grad-in-backward"),
    (["--accumulate-gradients"], "--accumulate-gradients"),
    (["--device-memory", "80GiB", "--device-profile", "h100"], "--device-memory 80GiB and --device-profile h100"),
]


@pytest.mark.parametrize(("flags", "named"), FLAGS)
@pytest.mark.parametrize("without", ["--no-predict", "--list-regions"])
def test_flags_that_only_a_prediction_heeds(fails, flags, named, without):
    code, line = fails("memopt-analyze", *TINY, without, *flags)
    assert (code, line) == (2, f"{without} predicts nothing; give it without {named}")


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--device-memory", "lots"], "device_memory='lots' is not legal; legal: a size from 1 byte, such as 80GiB"),
        (["--device-memory", "0"], "device_memory='0' is not legal"),
        (
            ["--device-profile", "h300"],
            "device_profile='h300' is not legal; legal: h200, h100, a100, rtx4090, or a file",
        ),
        (["--device-profile", "no.json"], "device profile 'no.json' cannot be read: No such file"),
        (["--optimizer", "adam"], "adamw-fused"),
        (["--grad-in-backward", "--accumulate-gradients"], "give one of them"),
    ],
)
def test_flags_that_are_wrong(fails, flags, part):
    code, line = fails("memopt-analyze", *TINY, *flags)
    assert code == 2
    assert part in line


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"copy_out_bytes_per_second": 0}, "copy_out_bytes_per_second must be a number above 0, not 0"),
        ({"half_flops": "790e12"}, 'half_flops must be a number above 0, not "790e12"'),
        ({"launch_us": float("nan")}, "launch_us must be a number above 0, not NaN"),
        ({"memory_bytes": True}, "memory_bytes must be a number above 0, not true"),
        ({"colour": "green"}, "it has colour, which no profile has"),
    ],
    ids=lambda changed: next(iter(changed)) if isinstance(changed, dict) else "",
)
def test_a_profile_that_cannot_be(fails, tmp_path, changed, why):
    path = tmp_path / "device.json"
    path.write_text(json.dumps(DEVICES["h200"].as_dict() | changed))
    code, line = fails("memopt-analyze", *TINY, "--device-profile", path)
    assert code == 2
    assert line.endswith(f"cannot be read: {why}; memopt-apply --profile-out writes one")


def test_help_teaches_them(command):
    _, out, _ = command("memopt-analyze", "--help")
    for part in ("--optimizer", "--grad-in-backward", "--device-memory", "--device-profile", "--no-predict", "rtx4090"):
        assert part in out
