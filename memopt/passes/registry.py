"""The passes by name, imported when one is asked for."""

import re
from dataclasses import fields
from importlib import import_module
from types import MappingProxyType
from typing import Any

from memopt.errors import RequestError, UnknownNameError
from memopt.passes.base import Pass

PASSES = MappingProxyType(
    {
        "activation-checkpoint": "memopt.passes.activation_checkpoint:ActivationCheckpoint",
        "attention-swap": "memopt.passes.attention_swap:AttentionSwap",
        "fine-grained-offload": "memopt.passes.fine_grained_offload:FineGrainedOffload",
        "prefetch-chain": "memopt.passes.prefetch_chain:PrefetchChain",
        "recompute-parts": "memopt.passes.recompute_parts:RecomputeParts",
    }
)


def make_pass(text: str) -> Pass:
    """Return the pass of that name, with the options that follow it: ``attention-swap:margin_bytes=0``.

    A list has a ``+`` between its items: ``fine-grained-offload:modules=core_attn+module:lm_head:fraction=0.5``.

    Raises UnknownNameError, RequestError for an option without a value, IllegalValueError for one with a wrong one.
    """
    name, *options = _COLON.split(text)
    if name not in PASSES:
        raise UnknownNameError("pass", name, PASSES)
    module, _, attribute = PASSES[name].partition(":")
    cls: type[Pass] = getattr(import_module(module), attribute)
    return cls(**dict(_option(cls, option) for option in options))


def parse_passes(text: str) -> tuple[Pass, ...]:
    """Return the passes of a comma-separated list, e.g. ``attention-swap,prefetch-chain``."""
    return tuple(make_pass(name.strip()) for name in text.split(",") if name.strip())


def _option(cls: type[Pass], text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    legal = [field.name for field in fields(cls)]
    if key not in legal:
        raise UnknownNameError(f"option of {cls.name}", key, legal)
    if not value:
        raise RequestError(f"option {key!r} of {cls.name} has no value; write {key}=VALUE")
    if key == _LIST:
        return key, tuple(value.split("+"))
    return key, _WORDS[value] if value in _WORDS else _number(value)


def _number(text: str) -> int | float | str:
    """Return the number that a text is, else the text."""
    if text.isdecimal():
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


_COLON = re.compile(r"(?<![=+]module):")
"""Between options; that of ``module:PATTERN`` is none."""
_LIST = "modules"
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}
