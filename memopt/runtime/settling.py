"""When a model's forward has ended, nothing is on its way out any more: memory is shortest as backward begins.

Not earlier: the copies of the last layers have the loss to run beside. It is the computation that waits, on the device.
"""

from typing import Any

from torch import nn

from memopt.runtime.engine import engines_at_work


def settle_copies(module: nn.Module, args: Any, output: Any) -> None:
    """Let what comes after a model's forward wait for its copies: the forward hook of a model that swaps."""
    for engine in engines_at_work():
        engine.settle()


def settle_after_forward(model: nn.Module) -> None:
    """Put the hook on a model, once: undoing what is inside of a model leaves it there."""
    if settle_copies not in model._forward_hooks.values():
        model.register_forward_hook(settle_copies)


def take_off_settling(model: nn.Module) -> None:
    """Remove the hook from a model, a copy of one, or what was wrapped around one."""
    for module in model.modules():  # PEFT may have wrapped the model since
        for key in [key for key, hook in module._forward_hooks.items() if hook is settle_copies]:
            del module._forward_hooks[key]
