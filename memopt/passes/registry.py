"""The passes by name, imported when one is asked for."""

from importlib import import_module
from types import MappingProxyType

from memopt.errors import UnknownNameError
from memopt.passes.base import Pass

PASSES = MappingProxyType(
    {
        "attention-swap": "memopt.passes.attention_swap:AttentionSwap",
        "prefetch-chain": "memopt.passes.prefetch_chain:PrefetchChain",
    }
)


def make_pass(name: str) -> Pass:
    """Return the pass of that name with its default options; raises UnknownNameError."""
    if name not in PASSES:
        raise UnknownNameError("pass", name, PASSES)
    module, _, attribute = PASSES[name].partition(":")
    made: Pass = getattr(import_module(module), attribute)()
    return made


def parse_passes(text: str) -> tuple[Pass, ...]:
    """Return the passes of a comma-separated list, e.g. ``attention-swap,prefetch-chain``."""
    return tuple(make_pass(name.strip()) for name in text.split(",") if name.strip())
