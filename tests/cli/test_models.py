"""The MODEL argument and the packaged presets."""

import json

import pytest

from memopt.cli.models import find_model
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


def test_the_presets_are_all_there():
    found = {path.stem for path in preset_path("tiny-llama").parent.glob("*.json")}
    assert found == set(PRESETS)
