"""What the MODEL argument means: a preset, a file, a directory, a cached hub id, or a factory."""

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memopt.cli.model_config import read_config
from memopt.errors import IllegalValueError, RequestError, TraceError, UnknownModelError
from memopt.presets import PRESETS, REAL, DefaultInput, preset_path

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model that was found but not built: its config, or the live model that a factory made."""

    name: str
    config: Any = None
    weights: str | None = None
    """Where `from_pretrained` finds weights; None for random ones."""
    live: Any = None
    default: DefaultInput = REAL


def find_model(text: str, *, num_layers: int | None = None) -> Source:
    """Return what a MODEL argument means; raises RequestError."""
    if not text.strip():
        raise UnknownModelError(text, PRESETS)
    if ":" in text and not Path(text).exists():
        if num_layers is not None:
            raise RequestError(f"--num-layers changes a config, and {text!r} builds its own model; leave it out")
        return _from_factory(text)
    source = _from_preset(text) or _from_path(text) or _from_cache(text)
    if source is None:
        raise UnknownModelError(text, PRESETS)
    if num_layers is not None:
        set_num_layers(source.config, num_layers)
    return source


def set_num_layers(config: Any, num_layers: int) -> None:
    """Make a config that of a model with so many layers, lists with an entry a layer included."""
    text_config = config.get_text_config()
    before = text_config.num_hidden_layers
    for key, value in vars(text_config).items():
        if isinstance(value, list) and len(value) == before:
            setattr(text_config, key, [value[n % before] for n in range(num_layers)])
    text_config.num_hidden_layers = num_layers


def adapt_live(model: Any, *, dtype: str | None, attn_implementation: str | None) -> None:
    """Give a factory's model the dtype and the attention that the flags name; None leaves it as it is."""
    import torch

    if dtype:
        model.to(getattr(torch, dtype))
    if attn_implementation and not hasattr(model, "set_attn_implementation"):
        raise RequestError(f"{type(model).__name__} has no set_attn_implementation(): leave out --attn-implementation")
    if attn_implementation:
        model.set_attn_implementation(attn_implementation)


@contextmanager
def attention_of(name: str | None) -> Iterator[None]:
    """Turn transformers' refusal of an attention implementation into a RequestError."""
    known = _known_attentions()
    if name is not None and name not in known and "/" not in name:
        raise IllegalValueError("attn_implementation", name, ", ".join(filter(_is_installed, known)))
    try:
        yield
    except ImportError as error:
        raise RequestError(f"attn_implementation={name!r} is not available here: {error}") from error


@contextmanager
def positions_of(config: Any, seq_length: int | None) -> Iterator[None]:
    """Say of an error that comes with more tokens than a model has positions that this may be why."""
    import torch

    try:
        yield
    except (IndexError, TraceError, torch.AcceleratorError) as error:
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        limit = getattr(config, "max_position_embeddings", None)
        if not isinstance(limit, int) or (seq_length or 0) <= limit:
            raise
        raise RequestError(
            f"--seq-length {seq_length} is more than the model's max_position_embeddings={limit}, and it fails: {error}"
        ) from error


def _known_attentions() -> list[str]:
    """Return the attentions that transformers trains with: its ``paged|...`` need the cache of its own generation."""
    from transformers import AttentionInterface

    return sorted({"eager", *(name for name in AttentionInterface().valid_keys() if "|" not in name)})


def _is_installed(attention: str) -> bool:
    """Tell whether the package that an attention comes from is there: flash attention has one a version."""
    from transformers import utils

    version = attention.removeprefix("flash_attention_")
    return version == attention or bool(getattr(utils, f"is_flash_attn_{version}_available", lambda: True)())


def _from_preset(text: str) -> Source | None:
    if text not in PRESETS:
        return None
    return Source(name=text, config=read_config(preset_path(text)), default=PRESETS[text])


def _from_path(text: str) -> Source | None:
    """Return the model of a config.json or of a directory with one; None for a text that is no path."""
    path = Path(text).expanduser()
    if path.is_dir():
        return _from_directory(path, path.resolve().name)
    if path.is_file() or path.suffix == ".json" or text.startswith((".", "/", "~")):
        name = path.resolve().parent.name if path.stem == "config" else path.stem
        config = read_config(path)
        return Source(name=name, config=config, default=_own_input(config))
    return None


def _from_cache(text: str) -> Source | None:
    """Return the model of a hub id that was downloaded before; None for one that was not."""
    if not _HUB_ID.fullmatch(text):
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(text, "config.json")
    return _from_directory(Path(cached).parent, text) if isinstance(cached, str) else None


def _from_directory(path: Path, name: str) -> Source:
    config = read_config(path / "config.json")
    has_weights = any(found for pattern in _WEIGHTS for found in path.glob(pattern))
    weights = str(path) if has_weights else None
    return Source(name=name, config=config, weights=weights, default=_own_input(config))


def _from_factory(text: str) -> Source:
    """Return the model that ``package.module:factory`` builds; modules of the working directory are found too."""
    from torch import nn

    module_name, _, attribute = text.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise RequestError(f"model factory {text!r} cannot be imported: {error}") from error
    model = factory() if callable(factory) else factory
    if not isinstance(model, nn.Module):
        raise RequestError(f"model factory {text!r} returned {type(model).__name__}, not a torch.nn.Module")
    return Source(name=text, live=model, config=getattr(model, "config", None))


def _own_input(config: Any) -> DefaultInput:
    """Return the default input of a config that is no preset: its own dtype."""
    dtype = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return replace(REAL, dtype=dtype) if dtype in ("float32", "bfloat16", "float16") else REAL
