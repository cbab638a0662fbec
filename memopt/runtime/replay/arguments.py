"""The arguments of a region's call, kept so that it can be called again with the same values."""

import copy
from collections import UserDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import is_
from typing import Any

import torch
from torch import nn

from memopt.errors import SavedTensorModifiedError
from memopt.runtime.prediction import alike
from memopt.runtime.replay.random_streams import is_generator
from memopt.tensors import storage_key

_ATOMS = frozenset({bool, int, float, str, type(None)})
_KEPT = (torch.Tensor, list, tuple, dict, deque, UserDict)
"""What is kept by value: tensors, and the containers that may hold some."""

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""What packs and unpacks saved tensors around a region: the user's."""


class Arguments:
    """What a region was called with: tensors by value, containers as they were, everything else as it is."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.leaves: list[_Leaf] = []
        self.generators: list[Any] = []
        self.parameters: list[nn.Parameter] = []
        """Passed as themselves: they are leaves anyway."""
        self._outer: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
        memo: dict[int, Any] = {}
        self._args = [self._node(value, memo) for value in args]
        self._kwargs = {name: self._node(value, memo) for name, value in kwargs.items()}

    @property
    def outer(self) -> Hooks | None:
        """What packs and unpacks the saved tensors around the region."""
        return self._outer

    def looks(self) -> tuple[Any, ...]:
        """Return what the tensors look like."""
        return tuple((leaf.tensor.shape, leaf.tensor.dtype, leaf.requires_grad) for leaf in self.leaves)

    def clone(self, positions: Collection[int] | None) -> None:
        """Copy the tensors that the region is known to write to, by position; all of them for None."""
        for position, leaf in enumerate(self.leaves):
            if positions is None or position in positions:
                leaf.clone = leaf.tensor.clone()

    def close(self, *, learns: bool) -> frozenset[int]:
        """Note which tensors the region wrote to, and return their positions; a call that learns copied all of them."""
        written = set()
        for position, leaf in enumerate(self.leaves):
            if learns:
                leaf.drop_clone()
            if leaf.clone is not None or leaf.is_written():
                written.add(position)
                leaf.shared = any(leaf.shares_storage(other) for other in self.leaves if other is not leaf)
            elif self._outer is not None:
                leaf.hand_over(self._outer)
        return frozenset(written)

    def again(self, fqn: str) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments anew; raises SavedTensorModifiedError if one does not have its value any more."""
        memo: dict[int, Any] = {}
        args = [_rebuilt(node, memo, fqn) for node in self._args]
        return args, {name: _rebuilt(node, memo, fqn) for name, node in self._kwargs.items()}

    def _node(self, value: Any, memo: dict[int, Any]) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is not torch.Tensor:
            if isinstance(value, nn.Parameter):
                self.parameters.append(value)
                return value
            if not isinstance(value, _KEPT):
                if is_generator(value):
                    self.generators.append(value)
                return value
        node = memo.get(id(value))
        if node is None and isinstance(value, torch.Tensor):
            node = memo[id(value)] = _Leaf(value)
            self.leaves.append(node)
        elif node is None:
            node = memo[id(value)] = _Branch()
            node.fill(value, [self._node(child, memo) for child in _children(value)])
        return node


class _Leaf:
    """One tensor, in all the places where it was passed."""

    __slots__ = ("_packed", "_shape", "_version", "clone", "requires_grad", "shared", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # with its graph it would keep that alive for ever: a region may write to inputs
        self.clone: torch.Tensor | None = None
        self.shared = False
        """Whether another argument changes when the region writes to this one."""
        self.requires_grad = tensor.requires_grad
        self._shape = tuple(tensor.shape)
        self._version = version_of(tensor)
        self._packed: tuple[Callable[[Any], torch.Tensor], Any] | None = None

    def is_written(self) -> bool:
        """Tell whether the tensor has changed since."""
        return version_of(self.tensor) != self._version

    def drop_clone(self) -> None:
        """Let go of a copy if the tensor holds the same values still."""
        if self.clone is not None and not differs(self.tensor, self._version, self.clone):
            self.clone = None

    def shares_storage(self, other: "_Leaf") -> bool:
        """Tell whether two tensors lie in one storage."""
        strided = self.tensor.layout is other.tensor.layout is torch.strided
        return strided and storage_key(self.tensor) == storage_key(other.tensor)

    def hand_over(self, outer: Hooks) -> None:
        """Leave the tensor to the hooks around the region, as any saved tensor; keep a witness of its version."""
        if self.tensor.is_inference():
            return  # it has no version by which to know whether it was written to
        self._packed = outer[1], outer[0](self.tensor)
        witness = self.tensor.detach()
        witness.data = torch.empty(0, dtype=witness.dtype)
        self.tensor = witness

    def value(self, fqn: str) -> torch.Tensor:
        """Return the tensor as the region met it."""
        if self.clone is not None and not self.shared:
            # Not a leaf of the graph: the region writes to it.
            return self.clone.detach().requires_grad_(self.requires_grad).clone()
        if self.is_written():
            raise SavedTensorModifiedError(
                fqn, self._shape, self._version, version_of(self.tensor), what="an argument of"
            )
        tensor = self.tensor if self._packed is None else self._packed[0](self._packed[1])
        return tensor.detach().requires_grad_(self.requires_grad)


class _Branch:
    """A list, tuple, deque or dict as it was when the region was entered."""

    __slots__ = ("_children", "_keys", "_original")

    def fill(self, value: Any, children: list[Any]) -> None:
        """Take a container's type and keys, and what stands for its children."""
        self._original = copied(value)
        self._keys = list(value) if isinstance(value, (dict, UserDict)) else None
        self._children = children

    def rebuild(self, memo: dict[int, Any], fqn: str) -> Any:
        """Return the container anew."""
        if isinstance(self._original, tuple):
            made = [_rebuilt(child, memo, fqn) for child in self._children]
            if all(map(is_, made, self._original)):
                return self._original  # a class of tuples may not be made as easily as tuples are
            return like(self._original, made)
        again = memo[id(self)] = copied(self._original)
        for key, child in zip(self._keys or range(len(self._children)), self._children, strict=True):
            _put(again, key, _rebuilt(child, memo, fqn))
        return again


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to; those made in inference mode do not count."""
    return -1 if tensor.is_inference() else tensor._version


def versions_of(tensors: Collection[torch.Tensor]) -> list[int]:
    """Return the versions of several tensors."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # one was made in inference mode
        return [version_of(tensor) for tensor in tensors]


def differs(tensor: torch.Tensor, version: int, before: torch.Tensor) -> bool:
    """Tell whether a tensor has changed since; batch_norm writes to its statistics without counting that."""
    return version_of(tensor) != version or not alike(tensor, before)


def copied(container: Any) -> Any:
    """Return a copy of a container that somebody may change; a dict that is read only is so for its users."""
    if isinstance(container, tuple):
        return container
    try:
        return copy.copy(container)
    except (TypeError, AttributeError):
        if not isinstance(container, dict):
            raise
        again = type(container).__new__(type(container))
        dict.update(again, container)
        return again


def like(original: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """Return a tuple of the same class and with the same attributes as another."""
    kind: Any = type(original)
    made = kind(*items) if hasattr(kind, "_fields") else kind(items)
    getattr(made, "__dict__", {}).update(getattr(original, "__dict__", {}))
    return made  # type: ignore[no-any-return]


def _put(container: Any, key: Any, value: Any) -> None:
    """Put an item into a copy of a container."""
    if container[key] is value:
        return
    try:
        container[key] = value
    except (TypeError, AttributeError):
        if not isinstance(container, dict):
            raise
        dict.__setitem__(container, key, value)


def _children(value: Any) -> Iterator[Any]:
    return iter(value.values() if isinstance(value, (dict, UserDict)) else value)


def _rebuilt(node: Any, memo: dict[int, Any], fqn: str) -> Any:
    if not isinstance(node, (_Leaf, _Branch)):
        return node
    if id(node) not in memo:
        memo[id(node)] = node.value(fqn) if isinstance(node, _Leaf) else node.rebuild(memo, fqn)
    return memo[id(node)]
