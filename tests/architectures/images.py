"""Words about an image: as many placeholders as a model makes of it, and the image as its vision tower takes it."""

import inspect

import torch
from torch.utils._pytree import tree_leaves

from tests import zoo

GRID = (1, 4, 4)
SIZE = 16


def takes_images(model):
    """Return whether a model puts what it makes of an image in the places of a token."""
    return _looker(model) is not None and bool(_images(model))


def looked_at(model):
    """Return words, among them the places of an image, and that image."""
    images = _images(model)
    ids = with_places(num_places(model, _looker(model), images))
    kinds = (ids == zoo.IMAGE).long()
    more = {"mm_token_type_ids": kinds, "moe_mm_token_type_ids": kinds, "token_type_ids": kinds}
    return {"input_ids": ids, "labels": ids} | images | {key: more[key] for key in more.keys() & _takes(model)}


def with_places(number, token=zoo.IMAGE):
    """Return words with a run of one token after the first."""
    words = zoo.words()["input_ids"]
    run = (zoo.VISION_START, *[token] * number, zoo.VISION_END)
    return torch.cat([words[:, :1], torch.tensor([run] * zoo.BATCH_SIZE), words[:, 1:]], dim=1)


@torch.no_grad()
def num_places(model, make, inputs):
    """Return into how many places of a text a model puts what it makes of images or sound; no statistics of it change."""
    takes = inspect.signature(make).parameters
    given = {key: value for key, value in inputs.items() if key in takes}
    model.eval()
    made = make(**given)
    model.train()
    if getattr(made, "pooler_output", None) is not None or hasattr(made, "last_hidden_state"):
        made = made.last_hidden_state if made.pooler_output is None else made.pooler_output
    return sum(leaf.numel() // leaf.shape[-1] for leaf in tree_leaves(made)) // zoo.BATCH_SIZE


def noise(*shape):
    return torch.randn(zoo.BATCH_SIZE, *shape, generator=torch.Generator().manual_seed(1))


def _looker(model):
    return getattr(model.base_model, "get_image_features", None) or getattr(model, "get_image_features", None)


def _takes(model):
    return inspect.signature(model.forward).parameters.keys()


def _images(model):
    """Return what the model takes of pixels or patches and of what says how they lie."""
    vision = getattr(model.config, "vision_config", None)
    name = type(model).__name__
    found = {"pixel_values": noise(3, SIZE, SIZE), "image_sizes": torch.tensor([[SIZE, SIZE]] * zoo.BATCH_SIZE)}
    if "image_grid_thw" in _takes(model):
        found = {"image_grid_thw": torch.tensor([GRID] * zoo.BATCH_SIZE)}
        found["pixel_values"] = _patches(vision)
    found |= OWN.get(name, dict)()
    return {key: value for key, value in found.items() if key in _takes(model) and value is not None}


def _patches(vision):
    """Return the patches of one image of 4 x 4 of them for each text."""
    channels = next(
        (c for name in ("in_channels", "in_chans", "num_channels") if (c := getattr(vision, name, None))), 3
    )
    depth = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", 1)
    return noise(4 * 4, channels * depth * vision.patch_size**2).flatten(0, 1)


def _one_of_many():
    return {"pixel_values": noise(1, 3, SIZE, SIZE)}


def _one_of_many_known():
    return _one_of_many() | {"pixel_attention_mask": torch.ones(zoo.BATCH_SIZE, 1, dtype=torch.bool)}


def _tiles():
    return {"pixel_values": noise(2, 3, SIZE, SIZE)}


def _separate_patches():
    return {"pixel_values": noise(4 * 4, 3, 8, 8).flatten(0, 1)}


def _flat_patches(side=2):
    """Return patches with their positions, 2 x 2 of an image or more."""
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    return noise(side**2, 3 * 8 * 8), places.expand(zoo.BATCH_SIZE, -1, -1)


def _shaped():
    patches, _ = _flat_patches()
    mask, shapes = torch.ones(patches.shape[:2], dtype=torch.long), torch.tensor([[2, 2]] * zoo.BATCH_SIZE)
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def _placed():
    patches, places = _flat_patches(side=4)
    return {"pixel_values": patches, "image_position_ids": places}


def _in_a_row():
    """Return images whose patches lie in one row, as those of MiniCPM."""
    row = torch.cat(list(noise(3, 8, 4 * 4 * 8)), dim=-1)[None]
    return {"pixel_values": row, "target_sizes": torch.tensor([[4, 4]] * zoo.BATCH_SIZE)}


def _deep_patches():
    """Return patches of two frames, channels last, as those of Inkling."""
    return {"pixel_values": noise(4, 2, 8, 8, 3).flatten(0, 1)}


def _merged_patches():
    """Return images of 1 x 2 x 2 squares of 2 x 2 patches, channels last."""
    grids = torch.tensor([[1, 2, 2]] * zoo.BATCH_SIZE)
    return {"pixel_values": noise(4, SIZE, SIZE, 3).flatten(0, 1), "image_grid_thw": grids}


def _pooled():
    """Return one crop an image, and for each of its places the four patches that are pooled there."""
    patches = torch.arange(4 * zoo.BATCH_SIZE).view(zoo.BATCH_SIZE, 4)
    grids = torch.tensor([[1, 1, 0, 0]] * zoo.BATCH_SIZE)
    return {"pixel_values": noise(4, 3 * 8 * 8), "image_token_pooling": patches, "image_grids": grids}


def _by_sides():
    return {
        "pixel_values": noise(4 * 4, 3 * 8 * 8).flatten(0, 1),
        "image_grid_hw": torch.tensor([[4, 4]] * zoo.BATCH_SIZE),
    }


OWN = {
    "AyaVisionForConditionalGeneration": lambda: {"pixel_values": noise(3, 2 * SIZE, 2 * SIZE)},
    "DeepseekVLHybridForConditionalGeneration": lambda: {"high_res_pixel_values": noise(3, SIZE, SIZE)},
    "FastVlmForConditionalGeneration": lambda: {"pixel_values": noise(3, 8 * SIZE, 8 * SIZE)},
    "Florence2ForConditionalGeneration": lambda: {"pixel_values": noise(3, 4 * SIZE, 4 * SIZE)},
    "Gemma3nForConditionalGeneration": lambda: {"pixel_values": noise(3, 4 * SIZE, 4 * SIZE)},
    "Gemma4ForConditionalGeneration": _placed,
    "Gemma4UnifiedForConditionalGeneration": _placed,
    "GraniteDoclingForConditionalGeneration": _one_of_many_known,
    "Idefics2ForConditionalGeneration": _one_of_many,
    "Idefics3ForConditionalGeneration": _one_of_many,
    "Inkling2ForConditionalGeneration": _merged_patches,
    "Inkling2LoopForConditionalGeneration": _merged_patches,
    "InklingForConditionalGeneration": _deep_patches,
    "InstructBlipForConditionalGeneration": lambda: {"qformer_input_ids": zoo.words()["input_ids"]},
    "Kimi_K25ForConditionalGeneration": _separate_patches,
    "Lfm2VlForConditionalGeneration": _shaped,
    "Llama4ForConditionalGeneration": lambda: {"vision_feature_select_strategy": "default"},
    "LlavaForConditionalGeneration": lambda: {"image_sizes": None},  # those are for another tower
    "LlavaNextForConditionalGeneration": _tiles,
    "LlavaNextVideoForConditionalGeneration": _tiles,
    "LlavaOnevisionForConditionalGeneration": _tiles,
    "Granite4VisionForConditionalGeneration": _tiles,
    "MiniCPMOcrForConditionalGeneration": _in_a_row,
    "MiniCPMV4_6ForConditionalGeneration": _in_a_row,
    "MiniCPMV4_7ForConditionalGeneration": _in_a_row,
    "ModernVBertForMaskedLM": _one_of_many,
    "Molmo2ForConditionalGeneration": _pooled,
    "NemotronH_Omni_Reasoning_V3": _by_sides,
    "PaddleOCRVLForConditionalGeneration": lambda: {"pixel_values": noise(4 * 4, 3, 8, 8).flatten(0, 1)},
    "PerceptionLMForConditionalGeneration": lambda: {"pixel_values": noise(1, 3, 28, 28)},
    "SmolVLMForConditionalGeneration": _one_of_many,
    "UltraVBertForMaskedLM": _one_of_many,
    "VideoLlama3ForConditionalGeneration": lambda: {"image_merge_sizes": torch.tensor([2] * zoo.BATCH_SIZE)},
    "VideoLlavaForConditionalGeneration": lambda: {"pixel_values_images": noise(3, SIZE, SIZE)},
}
"""By class: images of another shape, or with more said of them."""
