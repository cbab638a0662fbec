"""Models and batches to train: built from a seed, so that two runs can start alike."""

import inspect
from typing import Any

import torch
from torch import nn

from memopt.analyze import class_of_config
from memopt.cli.models import Source
from memopt.cli.request import InputRequest
from memopt.errors import RequestError


def pick_device(name: str) -> torch.device:
    """Return the device that was asked for; raises RequestError where there is none."""
    if name == "cpu":
        return torch.device("cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise RequestError("device='cuda' is not available: this torch sees no CUDA device; legal here: auto, cpu")
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    return torch.device(name)


def build_model(source: Source, given: InputRequest, *, device: torch.device, seed: int) -> nn.Module:
    """Return the model in train mode on its device, with its own weights or seeded random ones."""
    torch.manual_seed(seed)
    if source.live is not None:
        live: nn.Module = source.live
        return live.to(device).train()
    options = {"dtype": getattr(torch, str(given.dtype)), "attn_implementation": given.attn_implementation}
    model_class = class_of_config(source.config)
    if source.weights:
        model = model_class.from_pretrained(source.weights, config=source.config, **options).to(device)
    else:
        with device:
            model = model_class._from_config(source.config, **options)
    return model.train()


def make_batches(model: nn.Module, given: InputRequest, *, num: int, seed: int) -> list[dict[str, Any]]:
    """Return batches of random token ids, labels alike, where the model is; raises RequestError."""
    parameters = inspect.signature(model.forward).parameters
    if not {"input_ids", "labels"} <= parameters.keys():
        raise RequestError(f"{type(model).__name__}.forward takes no input_ids and labels: it cannot be trained here")
    generator = torch.Generator().manual_seed(seed)
    shape = (given.batch_size or 1, given.seq_length or 1)
    device = next(model.parameters()).device
    ids = [torch.randint(_vocabulary(model), shape, generator=generator).to(device) for _ in range(num)]
    extra = {"use_cache": False} if "use_cache" in parameters else {}
    return [{"input_ids": batch, "labels": batch, **extra} for batch in ids]


def _vocabulary(model: Any) -> int:
    if hasattr(model, "get_input_embeddings"):
        return int(model.get_input_embeddings().weight.shape[0])
    raise RequestError(f"{type(model).__name__} has no get_input_embeddings(): its vocabulary is unknown")
