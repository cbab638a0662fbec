"""The MODEL argument and the packaged presets."""

import json

import pytest
import torch

from memopt.cli.models import adapt_live, find_model
from memopt.errors import RequestError
from memopt.presets import PRESETS, preset_path


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_config_that_transformers_knows(name):
    source = find_model(name)
    facts = json.loads(preset_path(name).read_text())
    assert source.config.architectures == facts["architectures"]
    assert source.config.num_hidden_layers == facts["num_hidden_layers"]


@pytest.mark.parametrize("num_layers", [2, 6])
def test_num_layers_changes_lists_with_an_entry_a_layer(num_layers):
    config = find_model("tiny-qwen3-moe", num_layers=num_layers).config
    assert config.num_hidden_layers == num_layers
    assert len(getattr(config, "layer_types", None) or [None] * num_layers) == num_layers


def test_a_hub_id_in_the_local_cache_is_found_without_network(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(preset_path("tiny-llama").read_text())
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("abc")
    source = find_model("some/model")
    assert (source.name, source.config.model_type, source.weights) == ("some/model", "llama", None)


def test_a_factory_of_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(2, 2)\n")
    monkeypatch.chdir(tmp_path)
    assert type(find_model("my_models:build").live).__name__ == "Linear"


def test_a_factory_model_takes_dtype_and_attention():
    model = find_model("tests.cli.factories:llama").live
    adapt_live(model, dtype="bfloat16", attn_implementation="eager")
    assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.bfloat16"}
    assert model.config._attn_implementation == "eager"
    with pytest.raises(RequestError, match="Linear has no set_attn_implementation"):
        adapt_live(torch.nn.Linear(2, 2), dtype=None, attn_implementation="eager")


def test_the_presets_are_all_there():
    found = {path.stem for path in preset_path("tiny-llama").parent.glob("*.json")}
    assert found == set(PRESETS)
