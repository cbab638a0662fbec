"""What a rewriting must not meet, and must not change."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from memopt.errors import GraphCompileError, IncompatibleError, RewriteError


def check_rewritable(model: nn.Module) -> None:
    """Raise GraphCompileError for a compiled model, IncompatibleError for one with gradient checkpointing on."""
    for fqn, module in model.named_modules():
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise GraphCompileError(fqn or type(model).__name__)
        if getattr(module, "gradient_checkpointing", False):
            raise IncompatibleError("activation_swap='attention' is incompatible with activation checkpointing")


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Raise RewriteError, with the difference, if the body changes keys, names or parameters of a model."""
    before = _names(model)
    yield
    after = _names(model)
    for kind, old in before.items():
        if changed := old.items() ^ after[kind].items():
            names = sorted({name for name, _ in changed})
            raise RewriteError(f"rewriting changed the model's {kind}: {', '.join(names[:5])}")


def _names(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return, per kind, names with the identity of what they name; a state_dict holds fresh tensors, so only its keys."""
    return {
        "state_dict keys": dict.fromkeys(model.state_dict(), 0),
        "modules": {name: id(m) for name, m in model.named_modules(remove_duplicate=False)},
        "parameters": {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)},
        "buffers": {name: id(b) for name, b in model.named_buffers(remove_duplicate=False)},
    }
