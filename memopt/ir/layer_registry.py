"""Where the layers of known models are: class name to role to the paths under which a tree may have them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from memopt.ir.graph import ModuleNode

Paths = tuple[str, ...]
"""Candidates, the newest tree first; a model without its head has them without ``model.``."""
Value = TypeVar("Value")

TEXT = {"language": ("model.layers", "layers")}
LANGUAGE: Paths = ("model.language_model.layers", "language_model.model.layers", "language_model.layers")
ENCODER: Paths = (
    "model.vision_tower.encoder.layers",
    "model.vision_tower.vision_model.encoder.layers",
    "vision_tower.vision_model.encoder.layers",
    "vision_tower.encoder.layers",
)

GEMMA_3 = {"language": LANGUAGE, "vision": ENCODER}
GEMMA_3N = {"language": LANGUAGE, "audio": ("model.audio_tower.conformer", "audio_tower.conformer")}
GEMMA_4 = {**GEMMA_3, "audio": ("model.audio_tower.layers", "audio_tower.layers")}
QWEN_VL = {"language": (*LANGUAGE, "model.layers"), "vision": ("model.visual.blocks", "visual.blocks")}
LLAVA = {"language": LANGUAGE, "vision": ENCODER}
VIDEO_LLAVA = {
    "language": LANGUAGE,
    "vision": (
        "model.image_tower.encoder.layers",
        "image_tower.vision_model.encoder.layers",
        "image_tower.encoder.layers",
    ),
    "video": (
        "model.video_tower.encoder.layers",
        "video_tower.vision_model.encoder.layers",
        "video_tower.encoder.layers",
    ),
}
MISTRAL_3 = {
    "language": LANGUAGE,
    "vision": ("model.vision_tower.transformer.layers", "vision_tower.transformer.layers"),
}
LLAMA_4 = {"language": LANGUAGE, "vision": ("vision_model.model.layers", "model.vision_model.model.layers")}
LLAMA_NEMOTRON_VL = {
    "language": ("language_model.layers", "language_model.model.layers"),
    "vision": ("vision_model.vision_model.encoder.layers", "vision_model.encoder.layers"),
}
SMOL_VLM = {
    "language": ("model.text_model.layers", "text_model.layers"),
    "vision": ("model.vision_model.encoder.layers", "vision_model.encoder.layers"),
}
KIMI_VL = {
    "language": LANGUAGE,
    "vision": (
        "model.vision_tower.encoder.blocks",
        "vision_tower.encoder.blocks",
        "model.vision_tower.layers",
        "vision_tower.layers",
    ),
}
MINIMAX_M3 = {
    "language": (*LANGUAGE, "model.layers"),
    "vision": (
        "model.vision_tower.layers",
        "vision_tower.vision_model.encoder.layers",
        "model.vision_tower.vision_model.encoder.layers",
        "vision_tower.layers",
    ),
}
STEP_3_7 = {
    "language": LANGUAGE,
    "vision": (
        "model.vision_model.layers",
        "model.vision_model.transformer.resblocks",
        "vision_model.transformer.resblocks",
        "vision_model.layers",
    ),
}
BAGEL = {
    "language": ("model.language_model.model.layers", "language_model.model.layers"),
    "vision": ("model.vit_model.vision_model.encoder.layers", "vit_model.vision_model.encoder.layers"),
}
NEMOTRON_H = {"language": ("model.layers", "backbone.layers", "layers")}
GPT_2 = {"language": ("transformer.h", "h")}

LAYER_PATHS: Mapping[str, Mapping[str, Paths]] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": GEMMA_3,
        "Gemma3Model": GEMMA_3,
        "Gemma3ForCausalLM": TEXT,
        "Gemma3nForConditionalGeneration": GEMMA_3N,
        "Gemma3nModel": GEMMA_3N,
        "Gemma3nForCausalLM": TEXT,
        "Gemma4ForConditionalGeneration": GEMMA_4,
        "Gemma4Model": GEMMA_4,
        "Gemma4ForCausalLM": TEXT,
        "Gemma4UnifiedForConditionalGeneration": GEMMA_4,
        "Gemma4UnifiedModel": GEMMA_4,
        "Gemma4UnifiedForCausalLM": TEXT,
        "Qwen2VLForConditionalGeneration": QWEN_VL,
        "Qwen2VLModel": QWEN_VL,
        "Qwen2_5_VLForConditionalGeneration": QWEN_VL,
        "Qwen2_5_VLModel": QWEN_VL,
        "Qwen3VLForConditionalGeneration": QWEN_VL,
        "Qwen3VLModel": QWEN_VL,
        "Qwen3VLMoeForConditionalGeneration": QWEN_VL,
        "Qwen3VLMoeModel": QWEN_VL,
        "Qwen3_5ForConditionalGeneration": QWEN_VL,
        "Qwen3_5Model": QWEN_VL,
        "Qwen3_5ForCausalLM": TEXT,
        "Qwen3_5MoeForConditionalGeneration": QWEN_VL,
        "Qwen3_5MoeModel": QWEN_VL,
        "Qwen3_5MoeForCausalLM": TEXT,
        "LlavaForConditionalGeneration": LLAVA,
        "LlavaModel": LLAVA,
        "LlavaNextForConditionalGeneration": LLAVA,
        "LlavaNextModel": LLAVA,
        "LlavaNextVideoForConditionalGeneration": LLAVA,
        "LlavaNextVideoModel": LLAVA,
        "LlavaOnevisionForConditionalGeneration": LLAVA,
        "LlavaOnevisionModel": LLAVA,
        "VipLlavaForConditionalGeneration": LLAVA,
        "VipLlavaModel": LLAVA,
        "VideoLlavaForConditionalGeneration": VIDEO_LLAVA,
        "VideoLlavaModel": VIDEO_LLAVA,
        "Mistral3ForConditionalGeneration": MISTRAL_3,
        "Mistral3Model": MISTRAL_3,
        "Ministral3ForCausalLM": TEXT,
        "Ministral3Model": TEXT,
        "Ministral3BidirectionalModel": TEXT,
        "Llama4ForConditionalGeneration": LLAMA_4,
        "Llama4ForCausalLM": TEXT,
        "LlamaNemotronVLModel": LLAMA_NEMOTRON_VL,
        "SmolVLMForConditionalGeneration": SMOL_VLM,
        "SmolVLMModel": SMOL_VLM,
        "KimiVLForConditionalGeneration": KIMI_VL,
        "KimiK25VLForConditionalGeneration": KIMI_VL,
        "KimiK25ForConditionalGeneration": KIMI_VL,
        "Kimi_K25ForConditionalGeneration": KIMI_VL,
        "Kimi_K25Model": KIMI_VL,
        "MiniMaxM3SparseForConditionalGeneration": MINIMAX_M3,
        "MiniMaxM3VLModel": MINIMAX_M3,
        "Step3p7ForConditionalGeneration": STEP_3_7,
        "Step3p7Model": STEP_3_7,
        "BagelForUnifiedMultimodal": BAGEL,
        "Bagel": BAGEL,
        "NemotronHForCausalLM": NEMOTRON_H,
        "NemotronHModel": NEMOTRON_H,
        "GPT2LMHeadModel": GPT_2,
        "GPT2DoubleHeadsModel": GPT_2,
        "GPT2Model": GPT_2,
    }
)

WRAPPED: Mapping[str, Paths] = MappingProxyType(
    {
        "BiEncoderModel": ("model",),
        "CrossEncoderModel": ("model",),
        "FSDPBiEncoderModel": ("model",),
        "PeftModel": ("base_model.model", "base_model"),  # a prompt has no tuner around its model
        "PeftMixedModel": ("base_model.model", "base_model"),
        "BaseTuner": ("model",),  # PEFT's tuners without a PeftModel around them
        "DistributedDataParallel": ("module",),
        "OptimizedModule": ("_orig_mod",),
    }
)
"""Classes that only wrap a model, and where they have it."""


def known(node: ModuleNode, table: Mapping[str, Value]) -> Value | None:
    """Return what a table says of a module's class, or of the nearest class that it inherits from."""
    return next((table[name] for name in (node.class_name, *node.bases) if name in table), None)
