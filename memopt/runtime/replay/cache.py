"""Keep a key-value cache out of a checkpointed region: a replay would write to it a second time."""

from collections.abc import Mapping
from typing import Any


def holds_keys(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a cache among the arguments has something in it, on which the forward then depends."""
    return any(_is_cache(value) and _length(value) > 0 for value in (*args, *kwargs.values()))


def without_cache(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a training forward: no empty cache to be filled for nothing; the config stays as it is."""
    if not any(_is_cache(value) for value in (*args, *kwargs.values())):
        return args, dict(kwargs)
    kept = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    if kept.get("use_cache"):
        kept["use_cache"] = False
    return tuple(None if _is_cache(value) else value for value in args), kept


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length") and hasattr(value, "update")  # transformers' protocol


def _length(cache: Any) -> int:
    return int(cache.get_seq_length())
