"""What models are trained with: words and labels, and for some classes more or something else."""

import inspect

import torch

from tests import zoo


def batch(model):
    """Return the inputs of one training step, without a cache, whose strides checkpointed layers do not have."""
    inputs = INPUTS.get(type(model).__name__, zoo.words)() | {"use_cache": False}
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
    return {"inputs_embeds": embeddings, "position_ids": positions, "shared_kv_states": states}


def patched():
    """Return words cut into patches; without the lengths BLT's patcher, which is not trained, cuts by data: no trace."""
    return zoo.words() | {"patch_lengths": torch.tensor([[1, 1, 4, 4, 2]] * zoo.BATCH_SIZE)}


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
    "BltForCausalLM": patched,
    "Gemma4AssistantForCausalLM": drafted,
    "Gemma4UnifiedAssistantForCausalLM": drafted,
    "GitForCausalLM": captioned,
    "MusicgenForCausalLM": codes,
    "MusicgenMelodyForCausalLM": codes,
    "WhisperForCausalLM": heard,
}
"""By class; those that are not here are trained with words."""
