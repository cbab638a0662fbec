"""Tell which module an operator belongs to: in forward by Python's stack, in backward by the forward that made the node."""

import sys
from types import FrameType
from typing import Any

import torch
from torch import nn

from memopt.autograd import sequence_number


class Places:
    """The modules by name, and which of them each node of the graph was made in."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): fqn for fqn, module in model.named_modules()}
        self._made_in: dict[int, str] = {}

    def here(self) -> tuple[str, str]:
        """Return (module, node) of the operator that runs: the node is empty in a forward, a replay too."""
        node: Any = torch._C._current_autograd_node()
        if (fqn := self._on_stack(sys._getframe(2))) is not None:
            self._made_in[sequence_number() - 1] = fqn  # autograd makes its node before it calls the kernel
            return fqn, ""
        if node is None:
            return "", ""
        return self._made_in.get(node._sequence_nr(), ""), node.name().removesuffix("0")

    def _on_stack(self, frame: FrameType | None) -> str | None:
        while frame is not None:
            if frame.f_code.co_name == "forward":
                fqn = self._names.get(id(frame.f_locals.get("self")))
                if fqn is not None:
                    return fqn
            frame = frame.f_back
        return None
