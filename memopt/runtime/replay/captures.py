"""Look at what the modules inside a region return, without a function mode: a forward hook that is silent elsewhere."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

Capture = Callable[[nn.Module, Any], None]
"""Takes a module and its output."""


Hook = TypeVar("Hook", bound=Callable[..., Any])


def silent(hook: Hook) -> Hook:
    """Mark a hook of ours that changes nothing, and may be called in a replay as well."""
    hook.__dict__["_memopt_silent"] = True
    return hook


def is_silent(hook: Any) -> bool:
    """Tell whether a hook is one of those."""
    return "_memopt_silent" in getattr(hook, "__dict__", ())


class _Thread(threading.local):
    capture: Capture | None = None


_thread = _Thread()


@silent
def capture_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Show a module's output to the region that this thread is in the forward of: the hook.

    One function for all, so that a copy of the module, or a pickle, takes along nothing of the run.
    """
    if _thread.capture is not None:
        _thread.capture(module, output)


def watch_output(module: nn.Module) -> bool:
    """Make a module show its outputs, before other hooks may replace them; return False if it did already."""
    if capture_output in module._forward_hooks.values():
        return False
    module.register_forward_hook(capture_output, prepend=True)
    return True


def stop_watching(module: nn.Module) -> None:
    """Take the hook off a module and all inside it."""
    for child in module.modules():
        for key in [key for key, hook in child._forward_hooks.items() if hook is capture_output]:
            del child._forward_hooks[key]


@contextmanager
def capturing(capture: Capture) -> Iterator[None]:
    """Take the outputs that modules show in this thread."""
    before, _thread.capture = _thread.capture, capture
    try:
        yield
    finally:
        _thread.capture = before
