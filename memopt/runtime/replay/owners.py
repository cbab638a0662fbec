"""One module of a region and what it carries."""

import copy
import weakref
from collections.abc import Iterator
from itertools import takewhile
from operator import is_
from typing import Any

import torch
from torch import nn

from memopt.runtime.replay.contents import Contents

TORCH_ITSELF = frozenset(nn.Module().__dict__) - {"training"}
"""The attributes by which torch keeps parameters, buffers, children and hooks."""
_OF_TORCH = TORCH_ITSELF | {"training"}
_MISSING = object()


class Owner:
    """One module of a region and what it carries."""

    __slots__ = ("_module", "attributes", "buffers", "children", "is_plain", "name", "num_of_torch", "parameters")

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self._module = weakref.ref(module)  # the module holds all this itself, and dies when its last user lets go
        self.attributes = dict(module.__dict__)
        self.num_of_torch = sum(1 for _ in takewhile(_OF_TORCH.__contains__, self.attributes))
        """How many of the attributes, from the first on, are torch's own: nn.Module makes those first."""
        self.is_plain = self.attributes.keys() >= _OF_TORCH
        """Whether it has those: one that torch.jit has scripted keeps them elsewhere, and changes nothing of its own."""
        self.parameters = dict(module._parameters)
        self.buffers = dict(module._buffers)
        self.children = dict(module._modules)

    @property
    def module(self) -> nn.Module:
        """The module, which the region keeps alive."""
        module = self._module()
        assert module is not None
        return module

    def is_same(self) -> bool:
        """Tell whether the module carries the very same objects still."""
        module = self.module
        return (
            _is_same(module.__dict__, self.attributes)
            and _is_same(module._parameters, self.parameters)
            and _is_same(module._buffers, self.buffers)
            and _is_same(module._modules, self.children)
        )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers and the tensors among the attributes, by name."""
        for held in (self.buffers, self.attributes):
            yield from ((key, value) for key, value in held.items() if isinstance(value, torch.Tensor))

    def carries(self, key: str, tensor: torch.Tensor) -> bool:
        """Tell whether the module still has a tensor under its name."""
        held = self.module._buffers if key in self.buffers else self.module.__dict__
        return held.get(key) is tensor

    def carry(self, key: str, tensor: torch.Tensor) -> None:
        """Give the module another tensor under a name."""
        held = self.module._buffers if key in self.buffers else self.module.__dict__
        held[key] = tensor

    def without_graphs(self) -> "Owner":
        """Return the same with tensors detached that the region has put others in the place of.

        Those may descend from these: held with its graph, every forward would keep the one before it alive.
        """
        now = self.module.__dict__
        made = copy.copy(self)
        made.attributes = {
            key: value.detach().requires_grad_(value.requires_grad)
            if isinstance(value, torch.Tensor) and now.get(key, _MISSING) is not value
            else value
            for key, value in self.attributes.items()
        }
        return made

    def put(self, after: "Owner | None" = None) -> None:
        """Make the module carry the very same objects again; also where those of `after` were put in their place."""
        module = self.module
        if self.is_same():
            return
        _put(module.__dict__, self.attributes)
        _put(module._modules, self.children)
        _put(module._buffers, self.buffers)
        for key, parameter in self.parameters.items():
            present = module._parameters.get(key)
            if (after and present is after.parameters.get(key)) or _may_replace(parameter, present):
                module._parameters[key] = parameter

    def put_contents(self, contents: Contents, memo: dict[int, Any]) -> None:
        """Make the containers hold what they held, in copies."""
        for key, value in self.attributes.items():
            if key not in TORCH_ITSELF and (again := contents.again(value, memo)) is not value:
                self.module.__dict__[key] = again


def _may_replace(wanted: torch.Tensor | None, present: torch.Tensor | None) -> bool:
    """Tell whether one parameter may stand where another does.

    FSDP puts sharded and unsharded ones in each other's place (DTensors, or views whose storage it frees), and knows
    when. The tensors of `torch.func.functional_call` are no parameters, and the module's own are back in backward.
    """
    if type(present) is not nn.Parameter:
        return False
    return type(wanted) is nn.Parameter or (type(wanted) is torch.Tensor and wanted.untyped_storage().nbytes() > 0)


def _put(target: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Make a dict hold what another does, and touch it only where it does not."""
    for key in target.keys() - wanted.keys():
        del target[key]
    for key, value in wanted.items():
        if target.get(key, _MISSING) is not value:
            target[key] = value


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell whether two dicts hold the very same objects in the same order."""
    return len(one) == len(other) and all(map(is_, one, other)) and all(map(is_, one.values(), other.values()))
