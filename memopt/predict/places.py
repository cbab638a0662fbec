"""Tell which module an operator belongs to: who is called in forward and in a replay, who made the node in backward."""

from typing import Any

import torch
from torch import nn

from memopt.autograd import sequence_number
from memopt.runtime.replay.captures import silent


class Places:
    """The modules that are being called, by name, and which of them each node of the graph was made in."""

    def __init__(self, model: nn.Module) -> None:
        self._calls: list[tuple[str, int | None]] = []
        """(module, the node whose backward called it): a replay may end in the middle, and tells nobody."""
        self._made_in: dict[int, str] = {}
        self._hooks = []
        for fqn, module in model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(self._entering(fqn)))
            self._hooks.append(module.register_forward_hook(self._leave))

    def close(self) -> None:
        """Look at no further calls."""
        for hook in self._hooks:
            hook.remove()

    def here(self) -> tuple[str, str]:
        """Return (module, node) of the operator that runs: the node is empty in a forward, a replay too."""
        node: Any = torch._C._current_autograd_node()
        number = None if node is None else node._sequence_nr()
        while self._calls and self._calls[-1][1] != number:
            self._calls.pop()
        if self._calls:
            fqn = self._calls[-1][0]
            # Autograd makes its node before it calls the kernel; what runs later without a node is not that one's.
            self._made_in.setdefault(sequence_number() - 1, fqn)
            return fqn, ""
        return ("", "") if node is None else (self._made_in.get(number or 0, ""), node.name())

    def _entering(self, fqn: str) -> Any:
        @silent
        def enter(module: nn.Module, args: Any) -> None:
            node: Any = torch._C._current_autograd_node()
            self._calls.append((fqn, None if node is None else node._sequence_nr()))

        return enter

    @silent
    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._calls:
            self._calls.pop()
