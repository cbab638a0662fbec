"""Models by name: the published config.json facts of real ones, and tiny ones that train on a CPU in seconds."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultInput:
    """What a model is traced or trained with where the command line says nothing."""

    batch_size: int
    seq_length: int
    dtype: str


REAL = DefaultInput(batch_size=1, seq_length=1024, dtype="bfloat16")

PRESETS = {
    "qwen3-30b-a3b": REAL,
    "qwen3-235b-a22b": REAL,
    "qwen3-8b": REAL,
    "llama-3.1-8b": REAL,
    "tiny-qwen3-moe": DefaultInput(batch_size=2, seq_length=512, dtype="float32"),
    "tiny-llama": DefaultInput(batch_size=2, seq_length=1024, dtype="float32"),
}
"""The tiny ones' inputs make every self_attn save five tensors of 1 MiB or more: below that nothing is swapped."""


def preset_path(name: str) -> Path:
    """Return the config.json of a preset."""
    return Path(str(files(__name__) / f"{name}.json"))
