"""memopt: compiler-like passes that fit bigger training runs on the same GPU."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "analyze": "memopt.analyze",
    "passes": "memopt.passes",
    "plan": "memopt.api:plan",
    "predict": "memopt.predict",
    "apply": "memopt.api:apply",
    "undo": "memopt.api:undo",
    "regions": "memopt.ir.region_search:regions",
    "mark_not_offload": "memopt.runtime.marks:mark_not_offload",
    "load_plan": "memopt.ir:load_plan",
    "save_plan": "memopt.ir:save_plan",
    "Config": "memopt.config:Config",
    "CheckpointPolicy": "memopt.ir:CheckpointPolicy",
    "SwapManager": "memopt.runtime:SwapManager",
    "attention_swap_policy": "memopt.runtime:attention_swap_policy",
    "swap_wrapper": "memopt.runtime:swap_wrapper",
    "validate_attention_swap": "memopt.config:validate_attention_swap",
    "MemoptError": "memopt.errors:MemoptError",
}

__all__ = [*_HOMES, "__version__"]  # noqa: PLE0604  (the keys are literal names)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch and transformers take seconds, ``--help`` should not."""
    if name not in _HOMES:
        raise AttributeError(f"module 'memopt' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    home = import_module(module)
    value = getattr(home, attribute) if attribute else home
    globals()[name] = value
    return value
