"""Every registered class: transformers' own on the meta device, and stand-ins for those that it lacks."""

import re

import pytest
import transformers
from torch import nn
from transformers.models import kimi_k25

from memopt.ir.container_search import search
from memopt.ir.layer_registry import LAYER_PATHS
from memopt.ir.stacks import containment
from tests.ir.trees import containers, fake, graph_of_model, on_meta, stack

TEXT, VISION, AUDIO = 5, 7, 3  # the vision tower is the deeper one, and must win nowhere

VISUAL = ("model.language_model.layers", "model.visual.blocks")
TOWER = ("model.language_model.layers", "model.vision_tower.encoder.layers")
AUDIBLE = (*TOWER, "model.audio_tower.layers")
LIVE = {
    "Gemma3ForConditionalGeneration": TOWER,
    "Gemma3Model": TOWER,
    "Gemma3ForCausalLM": ("model.layers",),
    "Gemma3nForConditionalGeneration": ("model.language_model.layers", None, "model.audio_tower.conformer"),
    "Gemma3nModel": ("model.language_model.layers", None, "model.audio_tower.conformer"),
    "Gemma3nForCausalLM": ("model.layers",),
    "Gemma4ForConditionalGeneration": AUDIBLE,
    "Gemma4Model": AUDIBLE,
    "Gemma4ForCausalLM": ("model.layers",),
    "Gemma4UnifiedForConditionalGeneration": ("model.language_model.layers",),
    "Gemma4UnifiedModel": ("model.language_model.layers",),
    "Gemma4UnifiedForCausalLM": ("model.layers",),
    "Qwen2VLForConditionalGeneration": VISUAL,
    "Qwen2VLModel": VISUAL,
    "Qwen2_5_VLForConditionalGeneration": VISUAL,
    "Qwen2_5_VLModel": VISUAL,
    "Qwen3VLForConditionalGeneration": VISUAL,
    "Qwen3VLModel": VISUAL,
    "Qwen3VLMoeForConditionalGeneration": VISUAL,
    "Qwen3VLMoeModel": VISUAL,
    "Qwen3_5ForConditionalGeneration": VISUAL,
    "Qwen3_5Model": VISUAL,
    "Qwen3_5ForCausalLM": ("model.layers",),
    "Qwen3_5MoeForConditionalGeneration": VISUAL,
    "Qwen3_5MoeModel": VISUAL,
    "Qwen3_5MoeForCausalLM": ("model.layers",),
    "LlavaForConditionalGeneration": TOWER,
    "LlavaModel": TOWER,
    "LlavaNextForConditionalGeneration": TOWER,
    "LlavaNextModel": TOWER,
    "LlavaNextVideoForConditionalGeneration": TOWER,
    "LlavaNextVideoModel": TOWER,
    "LlavaOnevisionForConditionalGeneration": TOWER,
    "LlavaOnevisionModel": TOWER,
    "VipLlavaForConditionalGeneration": TOWER,
    "VipLlavaModel": TOWER,
    "VideoLlavaForConditionalGeneration": ("model.language_model.layers", "model.image_tower.encoder.layers"),
    "VideoLlavaModel": ("model.language_model.layers", "model.image_tower.encoder.layers"),
    "Mistral3ForConditionalGeneration": ("model.language_model.layers", "model.vision_tower.transformer.layers"),
    "Mistral3Model": ("model.language_model.layers", "model.vision_tower.transformer.layers"),
    "Ministral3ForCausalLM": ("model.layers",),
    "Ministral3Model": ("layers",),
    "Llama4ForConditionalGeneration": ("language_model.model.layers", "vision_model.model.layers"),
    "Llama4ForCausalLM": ("model.layers",),
    "SmolVLMForConditionalGeneration": ("model.text_model.layers", "model.vision_model.encoder.layers"),
    "SmolVLMModel": ("model.text_model.layers", "model.vision_model.encoder.layers"),
    "Kimi_K25ForConditionalGeneration": ("model.language_model.layers", "model.vision_tower.layers"),
    "Kimi_K25Model": ("model.language_model.layers", "model.vision_tower.layers"),
    "MiniMaxM3SparseForConditionalGeneration": ("model.language_model.layers", "model.vision_tower.layers"),
    "MiniMaxM3VLModel": ("model.language_model.layers", "model.vision_tower.layers"),
    "Step3p7ForConditionalGeneration": ("model.language_model.layers", "model.vision_model.layers"),
    "Step3p7Model": ("model.language_model.layers", "model.vision_model.layers"),
    "NemotronHForCausalLM": ("model.layers",),
    "NemotronHModel": ("layers",),
    "GPT2LMHeadModel": ("transformer.h",),
    "GPT2DoubleHeadsModel": ("transformer.h",),
    "GPT2Model": ("h",),
}
"""Paths of the language, vision and audio towers of the class with a head."""

SMOL = {"text_config": {"model_type": "llama", "pad_token_id": 0}, "pad_token_id": 0}
NEEDS = {
    "Gemma4": {"vision_config": {}, "audio_config": {}},
    "Gemma4Unified": {"vision_config": {}, "audio_config": {}},
    "SmolVLM": SMOL,
    "NemotronH": {"layers_block_type": ["mamba", "attention", "moe", "mamba", "attention"]},
}
"""What a default config does not say, by the name without its head."""

FAKES = {
    "Ministral3BidirectionalModel": [("layers",)],
    "LlamaNemotronVLModel": [
        ("language_model.layers", "vision_model.vision_model.encoder.layers"),
        ("language_model.layers", "vision_model.encoder.layers"),
        ("language_model.model.layers", "vision_model.encoder.layers"),
    ],
    "KimiVLForConditionalGeneration": [("model.language_model.layers", "model.vision_tower.encoder.blocks")],
    "KimiK25VLForConditionalGeneration": [("model.language_model.layers", "model.vision_tower.encoder.blocks")],
    "KimiK25ForConditionalGeneration": [("language_model.model.layers", "vision_tower.encoder.blocks")],
    "BagelForUnifiedMultimodal": [("model.language_model.model.layers", "model.vit_model.vision_model.encoder.layers")],
    "Bagel": [("language_model.model.layers", "vit_model.vision_model.encoder.layers")],
    # other trees of classes that transformers has
    "MiniMaxM3SparseForConditionalGeneration": [("model.layers", "vision_tower.vision_model.encoder.layers")],
    "Step3p7ForConditionalGeneration": [("model.language_model.layers", "model.vision_model.transformer.resblocks")],
    "NemotronHForCausalLM": [("backbone.layers",)],
    "Qwen2VLForConditionalGeneration": [("model.layers", "visual.blocks")],
    "Gemma3ForConditionalGeneration": [("language_model.model.layers", "vision_tower.vision_model.encoder.layers")],
}


@pytest.fixture(params=LIVE)
def live(request, monkeypatch):
    without_timm(monkeypatch)
    name = request.param
    cls = getattr(transformers, name, None) or getattr(kimi_k25, name)
    config = cls.config_class(**NEEDS.get(re.sub("(Model|ForConditionalGeneration|(?<=H)ForCausalLM)$", "", name), {}))
    shrink(config)
    return on_meta(lambda: cls(config))


def shrink(config):
    for part, num_layers in ((config, TEXT), (config.get_text_config(), TEXT), (vision(config), VISION)):
        for key in ("num_hidden_layers", "depth"):
            if hasattr(part, key):
                setattr(part, key, num_layers)
        if getattr(part, "num_kv_shared_layers", None) is not None:  # newer versions see whether these agree
            part.num_kv_shared_layers = 0
            part.layer_types = part.layer_types[:num_layers]
    audio = getattr(config, "audio_config", None)
    for key in ("num_hidden_layers", "conf_num_hidden_layers"):
        if hasattr(audio, key):
            setattr(audio, key, AUDIO)


def without_timm(monkeypatch):
    """Leave out Gemma3n's vision tower, which is timm's and has no container."""
    build = transformers.AutoModel.from_config

    def from_config(config):
        return nn.Identity() if config.model_type == "gemma3n_vision" else build(config)

    monkeypatch.setattr(transformers.AutoModel, "from_config", from_config)


def vision(config):
    return getattr(config, "vision_config", None)


def expected(name):
    """Return the containers of a class, whose path is shorter where it has no head."""
    towers = zip(("language", "vision", "audio"), LIVE[name], (TEXT, VISION, AUDIO), strict=False)
    found = [(role, path, num_layers) for role, path, num_layers in towers if path]
    if name.startswith("VideoLlava"):
        found.append(("video", "model.video_tower.encoder.layers", VISION))
    headless = name.endswith("Model") and not name.endswith(("HeadModel", "HeadsModel"))
    return [(role, path.removeprefix("model.") if headless else path, number) for role, path, number in found]


def test_every_registered_class_is_tested():
    assert LIVE.keys() | FAKES.keys() == LAYER_PATHS.keys()


def test_a_class_of_transformers(live):
    assert containers(live) == expected(type(live).__name__)


def test_the_search_would_find_the_same_language_tower(live):
    _, fqn, _ = expected(type(live).__name__)[0]
    assert search(containment(graph_of_model(live)), "") == {"language": fqn}


@pytest.mark.parametrize(("name", "paths"), [(name, paths) for name, trees in FAKES.items() for paths in trees])
def test_a_stand_in(name, paths):
    towers = list(zip(("language", "vision"), paths, (TEXT, VISION), strict=False))
    model = fake(name, {path: stack(num_layers) for _, path, num_layers in towers})
    assert containers(model) == towers


def test_no_stand_in_for_a_class_that_transformers_has():
    lacking = {name for name in LAYER_PATHS if not hasattr(transformers, name) and not hasattr(kimi_k25, name)}
    assert lacking == LAYER_PATHS.keys() - LIVE.keys()
