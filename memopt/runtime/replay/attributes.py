"""What the modules of a region carry: attributes, buffers, parameters. A replay finds them as the forward did."""

import copy
import operator
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memopt.errors import SavedTensorModifiedError
from memopt.runtime.replay.arguments import version_of

_TORCH_ITSELF = frozenset(nn.Module().__dict__) - {"training"}
"""The attributes by which torch keeps parameters, buffers, children and hooks."""
_CONTAINERS = (list, dict, set)
_MISSING = object()

Buffer = tuple[str, str]
"""(module, buffer), by name."""


class Attributes:
    """The state of a region's modules when it was entered."""

    def __init__(self, module: nn.Module) -> None:
        self._owners = [_Owner(name, child) for name, child in module.named_modules()]
        self._parameters = [(p, version_of(p)) for owner in self._owners for p in owner.parameters()]

    def clone(self, buffers: Collection[Buffer] | None) -> None:
        """Copy the buffers that the region is known to write to; all of them for None."""
        for owner in self._owners:
            owner.clone(buffers)

    def close(self) -> frozenset[Buffer]:
        """Note what the region changed, and let go of the rest; return the buffers that it wrote to."""
        return frozenset(buffer for owner in self._owners for buffer in owner.close())

    def check(self, fqn: str) -> None:
        """Raise SavedTensorModifiedError if a parameter is not what the forward used."""
        for parameter, version in self._parameters:
            if (now := version_of(parameter)) != version:
                raise SavedTensorModifiedError(fqn, tuple(parameter.shape), version, now, what="a parameter of")

    @contextmanager
    def restored(self, fqn: str) -> Iterator[None]:
        """Put the modules into the state of the entry for a while, and back into what they are now."""
        now = [(owner.module, [dict(held) for held in _held_by(owner.module)]) for owner in self._owners]
        try:
            for owner in self._owners:
                owner.enter(fqn)
            yield
        finally:
            for module, before in now:
                for held, content in zip(_held_by(module), before, strict=True):
                    _put(held, content)


class _Owner:
    """One module of a region and what it carried."""

    __slots__ = ("_attributes", "_buffers", "_children", "_clones", "_contents", "_name", "_parameters", "module")

    def __init__(self, name: str, module: nn.Module) -> None:
        self.module = module
        self._name = name
        self._attributes = dict(module.__dict__)
        self._contents = {
            key: copy.copy(value)
            for key, value in self._attributes.items()
            if type(value) in _CONTAINERS and key not in _TORCH_ITSELF
        }
        self._children = dict(module._modules)
        self._parameters = dict(module._parameters)
        self._buffers = {key: (b, version_of(b)) for key, b in module._buffers.items() if b is not None}
        self._clones: dict[str, torch.Tensor] = {}

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the module's own parameters."""
        return (p for p in self._parameters.values() if p is not None)

    def clone(self, buffers: Collection[Buffer] | None) -> None:
        """Copy own buffers: those named, or all."""
        for key, (buffer, _) in self._buffers.items():
            if buffers is None or (self._name, key) in buffers:
                self._clones[key] = buffer.detach().clone()

    def close(self) -> Iterator[Buffer]:
        """Note what has changed; yield the buffers that were written to."""
        now = self.module.__dict__
        if not _is_same(now, self._attributes):
            # What the region has put in place of a tensor may descend from it: held with its graph, every forward
            # would keep the one before it alive.
            for key, value in self._attributes.items():
                if isinstance(value, torch.Tensor) and now.get(key, _MISSING) is not value:
                    self._attributes[key] = value.detach().requires_grad_(value.requires_grad)
        self._contents = {
            key: content for key, content in self._contents.items() if not _holds_same(now.get(key), content)
        }
        for key, (buffer, version) in self._buffers.items():
            if version_of(buffer) != version:
                yield self._name, key
            else:
                self._clones.pop(key, None)

    def enter(self, fqn: str) -> None:
        """Make the module carry what it carried."""
        _put(self.module.__dict__, self._attributes | {k: copy.copy(v) for k, v in self._contents.items()})
        _put(self.module._modules, self._children)
        for key, parameter in self._parameters.items():
            # FSDP puts sharded and unsharded parameters in each other's place, and knows when.
            if type(parameter) is type(self.module._parameters.get(key)) is nn.Parameter:
                self.module._parameters[key] = parameter
        for key, (buffer, version) in self._buffers.items():
            if key in self._clones:
                self.module._buffers[key] = self._clones[key].clone()
            elif version_of(buffer) != version:
                raise SavedTensorModifiedError(
                    fqn, tuple(buffer.shape), version, version_of(buffer), what="a buffer of"
                )
            elif self.module._buffers.get(key) is not buffer:
                self.module._buffers[key] = buffer


def _held_by(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module.__dict__, module._buffers, module._parameters, module._modules


def _put(target: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Make a dict hold what another does, and touch it only where it does not."""
    if _is_same(target, wanted):
        return
    for key in target.keys() - wanted.keys():
        del target[key]
    for key, value in wanted.items():
        if target.get(key, _MISSING) is not value:
            target[key] = value


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell whether two dicts hold the very same objects."""
    return len(one) == len(other) and all(one.get(key, _MISSING) is value for key, value in other.items())


def _holds_same(container: Any, content: Any) -> bool:
    """Tell whether a container still holds the very same items."""
    if type(container) is not type(content) or len(container) != len(content):
        return False
    if isinstance(content, dict):
        return _is_same(container, content)
    if isinstance(content, set):
        return bool(container == content)
    return all(map(operator.is_, container, content))
