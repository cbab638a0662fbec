"""What models are trained with: words and labels, and for some classes more or something else."""

import inspect

import torch

from tests import zoo
from tests.architectures import images, sounds


def batch(model):
    """Return the inputs of one training step, without a cache, whose strides checkpointed layers do not have."""
    name = type(model).__name__
    if name in INPUTS:
        inputs = INPUTS[name]()
    elif images.takes_images(model):
        inputs = images.looked_at(model)
    else:
        inputs = sounds.listened_to(model) if sounds.takes_sound(model) else zoo.words()
    inputs |= {"use_cache": False}
    refused = {"labels", "use_cache"} - inspect.signature(model.forward).parameters.keys()
    return {key: value for key, value in inputs.items() if key not in refused}


def loss_of(output):
    """Return the loss, or for a model that has none the mean square of what it returns first."""
    loss = getattr(output, "loss", None)
    return output[0].float().square().mean() if loss is None else loss


def codes(num_codebooks=4):
    """Return a batch of audio codes: one row of words a codebook."""
    ids = torch.cat([zoo.words()["input_ids"]] * num_codebooks)
    return attending() | {"input_ids": ids, "labels": ids.view(zoo.BATCH_SIZE, num_codebooks, -1).transpose(1, 2)}


def attending():
    """Return words and what an encoder made, for decoders that attend to it."""
    states = torch.randn(zoo.BATCH_SIZE, 6, 32, generator=torch.Generator().manual_seed(1))
    return zoo.words() | {"encoder_hidden_states": states}


def heard():
    """Return words and what an encoder made, as Whisper's decoder takes it."""
    inputs = attending()
    return inputs | {"encoder_outputs": (inputs.pop("encoder_hidden_states"),)}


def captioned():
    """Return words and an image before them, without placeholders for it."""
    pixels = torch.randn(zoo.BATCH_SIZE, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return zoo.words() | {"pixel_values": pixels}


def drafted():
    """Return what an assistant gets from the model it drafts for: embeddings, and keys and values by kind of layer."""
    generator = torch.Generator().manual_seed(1)
    embeddings = torch.randn(zoo.BATCH_SIZE, zoo.SEQ_LENGTH, 64, generator=generator)
    positions = torch.arange(zoo.SEQ_LENGTH).expand(zoo.BATCH_SIZE, -1)
    keys, values = (torch.randn(zoo.BATCH_SIZE, 2, zoo.SEQ_LENGTH, 8, generator=generator) for _ in range(2))
    states = {kind: (keys, values) for kind in ("full_attention", "sliding_attention")}
    kept = {"logits_to_keep": torch.arange(zoo.SEQ_LENGTH)}
    return {"inputs_embeds": embeddings, "position_ids": positions, "shared_kv_states": states} | kept


def patched():
    """Return words cut into patches; without the lengths BLT's patcher, which is not trained, cuts by data: no trace."""
    return zoo.words() | {"patch_lengths": torch.tensor([[1, 1, 4, 4, 2]] * zoo.BATCH_SIZE)}


def said_of():
    """Return an image without words, for a decoder that writes them."""
    return {"pixel_values": images.noise(3, images.SIZE, images.SIZE), "labels": zoo.words()["labels"]}


def among_others():
    """Return words and an image for each, of which the words may see it."""
    pixels = images.noise(1, 3, images.SIZE, images.SIZE)
    seen = torch.ones(zoo.BATCH_SIZE, zoo.SEQ_LENGTH, 1, dtype=torch.long)
    return zoo.words() | {"pixel_values": pixels, "image_attention_mask": seen}


def at_positions():
    """Return words with the places of an image marked by a mask."""
    ids = images.with_places(4)
    return {"input_ids": ids, "labels": ids, "image_embeds_position_mask": ids == zoo.IMAGE}


def kosmos2():
    return at_positions() | {"pixel_values": images.noise(3, images.SIZE, images.SIZE)}


def kosmos2_5():
    return at_positions() | {"flattened_patches": flattened()["flattened_patches"]}


def flattened():
    """Return patches, each after its row and column."""
    places = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]]).expand(zoo.BATCH_SIZE, -1, -1).float()
    return {"flattened_patches": torch.cat([places, images.noise(4, 48)], dim=-1), "labels": zoo.words()["labels"]}


def instructed_video():
    words = zoo.words()["input_ids"]
    ids = images.with_places(2 * 4)
    frames = images.noise(2, 3, images.SIZE, images.SIZE)
    return {"input_ids": ids, "labels": ids, "pixel_values": frames, "qformer_input_ids": words}


def laid_out():
    """Return words, where they stand on a page, and the page."""
    boxes = torch.tensor([0.1, 0.1, 0.4, 0.4]).expand(zoo.BATCH_SIZE, zoo.SEQ_LENGTH, -1)
    return captioned() | {"bbox": boxes}


def protein():
    """Return words about a protein."""
    ids = zoo.words()["input_ids"] % 20 + 4
    return zoo.words() | {"protein_input_ids": ids, "protein_attention_mask": torch.ones_like(ids)}


def painted():
    """Return words with places of patches of an image, as Fuyu takes them."""
    ids = images.with_places(4)
    return {"input_ids": ids, "labels": ids, "image_patches": images.noise(4, 3 * 8 * 8)}


def cross_attended():
    """Return words and one image of four tiles, to which they attend."""
    tiles, ratio = images.noise(1, 4, 3, images.SIZE, images.SIZE), torch.ones(zoo.BATCH_SIZE, 1, dtype=torch.long)
    there = torch.ones(zoo.BATCH_SIZE, zoo.SEQ_LENGTH, 1, 4, dtype=torch.long)
    said = {"aspect_ratio_ids": ratio, "aspect_ratio_mask": there[:, 0], "cross_attention_mask": there}
    return zoo.words() | {"pixel_values": tiles} | said


def acting():
    """Return what a robot saw, was told and did."""
    ids = images.with_places(4)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": images.noise(1, 3, images.SIZE, images.SIZE),
        "pixel_attention_mask": torch.ones(zoo.BATCH_SIZE, 1, dtype=torch.bool),
        "state": images.noise(32),
        "actions": images.noise(8, 32),
    }


def spoken():
    """Return words, and for each as much of a sound as is put on top of it."""
    return zoo.words() | {"input_features": images.noise(128, 8 * zoo.SEQ_LENGTH)}


def written():
    return said_of() | {"decoder_input_ids": zoo.words()["input_ids"]}


def globally():
    """Return words of which the first attends to all and is attended to by all."""
    words = zoo.words()
    seen = torch.zeros_like(words["input_ids"])
    seen[:, 0] = 1
    return words | {"global_attention_mask": seen}


def longer():
    ids = torch.cat([zoo.words()["input_ids"]] * 2, dim=1)
    return {"input_ids": ids, "labels": ids}


_ATTEND = (
    "BartForCausalLM", "BigBirdPegasusForCausalLM", "BlenderbotForCausalLM", "BlenderbotSmallForCausalLM",
    "MBartForCausalLM", "MarianForCausalLM", "MvpForCausalLM", "PLBartForCausalLM", "PegasusForCausalLM",
    "ProphetNetForCausalLM", "TrOCRForCausalLM",
)  # fmt: skip
INPUTS = {
    **dict.fromkeys(_ATTEND, attending),
    "BigBirdForCausalLM": longer,  # with fewer blocks its layers become dense ones in the first step
    "BigBirdForMaskedLM": longer,
    "BigBirdPegasusForConditionalGeneration": longer,
    "BlipForConditionalGeneration": captioned,
    "BltForCausalLM": patched,
    "EvollaForProteinText2Text": protein,
    "FuyuForCausalLM": painted,
    "Gemma4AssistantForCausalLM": drafted,
    "Gemma4UnifiedAssistantForCausalLM": drafted,
    "GitForCausalLM": captioned,
    "Granite4VisionForConditionalGeneration": zoo.words,
    "IdeficsForVisionText2Text": among_others,
    "InstructBlipVideoForConditionalGeneration": instructed_video,
    "Kosmos2ForConditionalGeneration": kosmos2,
    "Kosmos2_5ForConditionalGeneration": kosmos2_5,
    "LEDForConditionalGeneration": globally,
    "LongformerForMaskedLM": globally,
    "MllamaForConditionalGeneration": cross_attended,
    "MusicgenForCausalLM": codes,
    "MusicgenMelodyForCausalLM": codes,
    "MusicFlamingoForConditionalGeneration": zoo.words,
    "NeoMMEForMaskedLM": zoo.words,
    "PI0ForConditionalGeneration": acting,
    "PPFormulaNetForConditionalGeneration": written,
    "Pix2StructForConditionalGeneration": flattened,
    "UdopForConditionalGeneration": laid_out,
    "VisionEncoderDecoderModel": said_of,
    "VoxtralRealtimeForConditionalGeneration": spoken,
    "WhisperForCausalLM": heard,
}
"""By class; those that are not here are trained with words."""
