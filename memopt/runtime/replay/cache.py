"""Keep a key-value cache out of a checkpointed region: a replay would write to it a second time."""

import functools
import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

_logger = logging.getLogger("memopt")
_told: WeakValueDictionary[tuple[int, bool], Any] = WeakValueDictionary()
"""The models whose users know of a dropped or a full cache, each by its configuration and which of the two."""
_NO_CACHES = frozenset({torch.Tensor, bool, int, tuple})
_STAYS_EMPTY = (
    "use_cache=True is incompatible with activation checkpointing: the cache stays empty while the model trains; "
    "pass use_cache=False, or train on a cache that a forward under torch.no_grad() has filled"
)
_HOLDS_KEYS = (
    "layers whose cache holds keys already (a prefix, a prompt), or is read by other layers, are not checkpointed while "
    "the model trains on it: activation checkpointing steps aside there, and saves no memory"
)


def holds_keys(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a cache among the arguments holds something of this layer, or will for others, which depend on it.

    The layers before it, where they are not checkpointed, may have filled their parts of an empty cache meanwhile.
    """
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if not caches:
        return False
    return _fills_for_others(type(module)) or any(_length(cache, _layer_index(module)) > 0 for cache in caches)


def without_cache(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a training forward: no empty cache to be filled for nothing; the config stays as it is."""
    if not has_cache(args, kwargs):
        return args, dict(kwargs)
    kept = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    if kept.get("use_cache"):
        kept["use_cache"] = False
    return tuple(None if _is_cache(value) else value for value in args), kept


def has_cache(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether there is a cache among the arguments."""
    return any(_is_cache(value) for value in (*args, *kwargs.values()))


def tell_once(module: nn.Module, *, is_full: bool = False) -> None:
    """Say what becomes of a cache, as transformers does under its own checkpointing: once for each model."""
    configs = (child.__dict__.get("config") for child in module.modules())
    model = next((config for config in configs if config is not None), type(module))
    if _told.get((id(model), is_full)) is not model:
        _told[id(model), is_full] = model
        _logger.warning(_HOLDS_KEYS if is_full else _STAYS_EMPTY)


def _is_cache(value: Any) -> bool:
    if value is None or type(value) in _NO_CACHES:  # to ask a tensor for what it lacks takes a microsecond
        return False
    return hasattr(value, "get_seq_length") and hasattr(value, "update")  # transformers' protocol


@torch.compiler.assume_constant_result
@functools.cache
def _fills_for_others(cls: type) -> bool:
    """Tell whether layers that are written beside this class only read a cache, by transformers' mark for them.

    Such a cache is no byproduct: without it, a decoder would not see its prompt.
    """
    files = [vars(sys.modules[base.__module__]) for base in cls.__mro__ if base.__module__ in sys.modules]
    return any(_only_reads(value) for file in files for value in list(file.values()))


def _only_reads(value: Any) -> bool:
    return isinstance(value, type) and getattr(value, "_can_checkpoint_with_cache", False) is True


def _layer_index(module: nn.Module) -> int | None:
    indices = (child.__dict__.get("layer_idx") for child in module.modules())
    return next((index for index in indices if isinstance(index, int)), None)


def _length(cache: Any, layer: int | None) -> int:
    """Return how much a cache holds of a layer; of linear attention, which counts nothing, whether it holds a state."""
    try:
        return int(cache.get_seq_length() if layer is None else cache.get_seq_length(layer))
    except ValueError:  # transformers refuses to count what a layer of linear attention has seen
        with suppress(ValueError):  # and has nothing of a layer that borrows the keys of another
            return int(cache.has_previous_state(layer))
        return 0
