"""Words about a sound: as many placeholders as a model makes of it, and the sound as its tower takes it."""

import inspect

import torch

from tests import zoo
from tests.architectures.images import noise, num_places, with_places

NUM_FRAMES = {"Qwen3ASRForConditionalGeneration": 100}
"""By class, where it is not 24."""

LENGTH_FIRST = frozenset({"Nemotron3_5TranscribeForConditionalGeneration"})
_CONFIGS = ("audio_config", "encoder_config", "acoustic_tokenizer_encoder_config")
NUM_SAMPLES = 96
"""Of a sound that is taken as it is."""


def takes_sound(model):
    """Return whether a model is of sound and words, and puts what it makes of one in the places of a token."""
    audio = _audio(model)
    return _listener(model) is not None and audio is not None and not hasattr(model.config, "vision_config")


def listened_to(model):
    """Return words, among them the places of a sound, and that sound."""
    sounds = _sounds(model)
    ids = with_places(num_places(model, _listener(model), sounds), zoo.SOUND)
    return {"input_ids": ids, "labels": ids} | sounds


def _listener(model):
    return getattr(model.base_model, "get_audio_features", None) or getattr(model, "get_audio_features", None)


def _audio(model):
    found = (getattr(model.config, name, None) for name in _CONFIGS)
    audio = next((config for config in found if config is not None), None)
    return getattr(audio, "asr_config", audio)


def _sounds(model):
    """Return what the model takes of features and of the mask that says which are there."""
    audio, takes = _audio(model), inspect.signature(model.forward).parameters.keys()
    if "input_values" in takes:
        return {"input_values": noise(1, NUM_SAMPLES)}
    length = NUM_FRAMES.get(type(model).__name__, 24)
    width = None if hasattr(audio, "input_dim") else audio.num_mel_bins
    features = noise(width, length) if width else noise(length, audio.input_dim)
    if type(model).__name__ in LENGTH_FIRST:
        features = features.transpose(1, 2).contiguous()
    there = torch.ones(zoo.BATCH_SIZE, length, dtype=torch.long)
    masks = dict.fromkeys(("input_features_mask", "feature_attention_mask", "padding_mask"), there)
    found = {"input_features": features} | masks
    if width is None:
        found["input_features_mask"] = None
    return {key: value for key, value in found.items() if key in takes and value is not None}
