"""What the modules of a region carry: attributes, buffers, parameters. A replay finds them as the forward did."""

import copy
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import nn

from memopt.errors import ReplayError, SavedTensorModifiedError
from memopt.runtime.replay.arguments import differs, version_of
from memopt.runtime.replay.contents import Contents
from memopt.tensors import storage_key

_TORCH_ITSELF = frozenset(nn.Module().__dict__) - {"training"}
"""The attributes by which torch keeps parameters, buffers, children and hooks."""
_MISSING = object()
_COUNTER = "num_batches_tracked"
"""Of a BatchNorm, which may run in some calls only."""
_STATISTICS = ("running_mean", "running_var")
"""Of a BatchNorm, which saves them, and then writes to them without counting."""

Buffer = tuple[str, str]
"""(module, buffer), by name. A tensor that is a plain attribute counts as a buffer here."""


class Snapshot:
    """What the modules of a region carry by reference; the calls of the region share it as long as it holds."""

    def __init__(self, module: nn.Module) -> None:
        self.owners = tuple(_Owner(name, child) for name, child in module.named_modules())
        self.parameters = tuple(p for owner in self.owners for p in owner.parameters.values() if p is not None)
        self.plain_parameters = tuple(p for p in self.parameters if _stays_in_place(p))
        self.buffers = tuple((owner, key, b) for owner in self.owners for key, b in owner.tensors())
        self.statistics = frozenset(storage_key(b) for _, key, b in self.buffers if key in _STATISTICS)
        self.contents = Contents(v for o in self.owners for k, v in o.attributes.items() if k not in _TORCH_ITSELF)
        self.generators = self.contents.generators
        self.is_lasting = all(p.is_leaf for p in self.parameters)
        """Whether it may be kept beyond a call: with it a graph would be kept that made the parameters."""
        self._carried = self._flat()

    def modules(self) -> Iterator[nn.Module]:
        """Yield the modules."""
        return (owner.module for owner in self.owners)

    def holds(self) -> bool:
        """Tell whether the modules carry the very same objects still, under the same names."""
        now = self._flat()
        return len(now) == len(self._carried) and all(map(is_, now, self._carried)) and self.contents.holds()

    def _flat(self) -> list[Any]:
        """Return the names and values of all that the modules carry. One list: this is in every call."""
        flat: list[Any] = []
        for owner in self.owners:
            for held in _held_by(owner.module):
                if held:
                    flat += held
                    flat += held.values()
        return flat


class Attributes:
    """The state of a region's modules when it was entered."""

    def __init__(self, snapshot: Snapshot, parameters: Iterable[nn.Parameter] = ()) -> None:
        self._snapshot = snapshot
        self.parameters = (*snapshot.parameters, *parameters)
        self._parameter_versions = [version_of(p) for p in self.parameters]
        self._storages = [storage_key(p) for p in snapshot.plain_parameters]
        self._plain_parameters = snapshot.plain_parameters
        self._buffer_versions = [version_of(b) for _, _, b in snapshot.buffers]
        self._clones: dict[Buffer, torch.Tensor] = {}

    def clone(self, buffers: Collection[Buffer] | None) -> None:
        """Copy the buffers that the region is known to write to; all of them for None."""
        for owner, key, buffer in self._snapshot.buffers:
            if buffers is None or (owner.name, key) in buffers or key == _COUNTER:
                self._clones[owner.name, key] = buffer.detach().clone().requires_grad_(buffer.requires_grad)

    def close(self, *, learns: bool) -> frozenset[Buffer]:
        """Note what the region changed, and let go of the rest; return the buffers that it wrote to."""
        if not self._snapshot.holds():
            self._snapshot = copy.copy(self._snapshot)
            self._snapshot.owners = tuple(owner.without_graphs() for owner in self._snapshot.owners)
            self._let_go_of_replaced()
        if learns:
            self._drop_clones()
        return frozenset((owner.name, key) for owner, key, _ in self._changed_buffers())

    def check_parameters(self, fqn: str) -> None:
        """Raise an error if a parameter is not what the forward used.

        ReplayError where other data was put into it, since autograd, which still has the old, would not mind.
        """
        for parameter, version in zip(self.parameters, self._parameter_versions, strict=True):
            if (now := version_of(parameter)) != version:
                raise SavedTensorModifiedError(fqn, tuple(parameter.shape), version, now, what="a parameter of")
        for parameter, storage in zip(self._plain_parameters, self._storages, strict=True):
            if storage_key(parameter) != storage:
                raise ReplayError(
                    fqn, f"needs a parameter of shape {list(parameter.shape)} whose .data was replaced since"
                )

    def check_buffers(self, fqn: str) -> None:
        """Raise an error for what the replay cannot put back.

        SavedTensorModifiedError for a buffer that is not what the forward used, where no copy of it is there; ReplayError
        for one that the forward wrote to and that shares its memory with another.
        """
        changed = {id(buffer): buffer for _, _, buffer in self._changed_buffers()}
        for buffer in changed.values():
            for _, key, other in self._snapshot.buffers:
                if other is not buffer and _share_memory(buffer, other):
                    raise ReplayError(fqn, f"needs {key!r} as it was, of which the forward wrote to a view")
        for (owner, key, buffer), version in zip(self._snapshot.buffers, self._buffer_versions, strict=True):
            if (now := version_of(buffer)) != version and (owner.name, key) not in self._clones:
                raise SavedTensorModifiedError(fqn, tuple(buffer.shape), version, now, what="a buffer of")

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put the modules into the state of the entry for a while, and back into what they are now."""
        now = then = self._snapshot.owners
        try:
            if not self._snapshot.holds():
                now = tuple(_Owner(owner.name, owner.module) for owner in then)
                memo: dict[int, Any] = {}
                for owner in then:
                    owner.put()
                    owner.put_contents(self._snapshot.contents, memo)
            again: dict[int, torch.Tensor] = {}
            for owner, key, buffer in self._changed_buffers():
                if id(buffer) not in again:  # one tensor may have several names
                    again[id(buffer)] = self._clones[owner.name, key].clone()
                owner.carry(key, again[id(buffer)])
            with _put_back(b for _, _, b in self._snapshot.buffers if id(b) not in again and _may_be_statistics(b)):
                yield
        finally:
            if now is not then or not self._snapshot.holds():
                for owner, other in zip(now, then, strict=True):
                    owner.put(after=other)

    def _let_go_of_replaced(self) -> None:
        """Forget the buffers in whose place the forward put others: those may descend from them, graph and all."""
        entries = zip(self._snapshot.buffers, self._buffer_versions, strict=True)
        kept = [(entry, version) for entry, version in entries if entry[0].carries(entry[1], entry[2])]
        self._snapshot.buffers = tuple(entry for entry, _ in kept)
        self._buffer_versions = [version for _, version in kept]
        names = {(owner.name, key) for owner, key, _ in self._snapshot.buffers}
        self._clones = {name: clone for name, clone in self._clones.items() if name in names}

    def _drop_clones(self) -> None:
        """Let go of the copies of buffers that hold the same values still."""
        for (owner, key, buffer), version in zip(self._snapshot.buffers, self._buffer_versions, strict=True):
            if not differs(buffer, version, self._clones[owner.name, key]):
                del self._clones[owner.name, key]

    def _changed_buffers(self) -> "Iterator[tuple[_Owner, str, torch.Tensor]]":
        for entry, version in zip(self._snapshot.buffers, self._buffer_versions, strict=True):
            owner, key, buffer = entry
            if (owner.name, key) in self._clones or version_of(buffer) != version:
                yield entry


class _Owner:
    """One module of a region and what it carries."""

    __slots__ = ("_module", "attributes", "buffers", "children", "name", "parameters")

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self._module = weakref.ref(module)  # the module holds all this itself, and dies when its last user lets go
        self.attributes = dict(module.__dict__)
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

    def without_graphs(self) -> "_Owner":
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

    def put(self, after: "_Owner | None" = None) -> None:
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
            if key not in _TORCH_ITSELF and (again := contents.again(value, memo)) is not value:
                self.module.__dict__[key] = again


def _stays_in_place(parameter: torch.Tensor) -> bool:
    """Tell whether a parameter keeps its storage from forward to backward; DeepSpeed's are gathered into new ones."""
    return type(parameter) is nn.Parameter and parameter.layout is torch.strided and not hasattr(parameter, "ds_id")


def _may_replace(wanted: torch.Tensor | None, present: torch.Tensor | None) -> bool:
    """Tell whether one parameter may stand where another does.

    FSDP puts sharded and unsharded ones in each other's place (DTensors, or views whose storage it frees), and knows
    when. The tensors of `torch.func.functional_call` are no parameters, and the module's own are back in backward.
    """
    if type(present) is not nn.Parameter:
        return False
    return type(wanted) is nn.Parameter or (type(wanted) is torch.Tensor and wanted.untyped_storage().nbytes() > 0)


@contextmanager
def _put_back(buffers: Iterable[torch.Tensor]) -> Iterator[None]:
    """Give buffers the values back that they have now, without counting it as a write."""
    before = [(buffer, buffer.detach().clone()) for buffer in buffers]
    try:
        yield
    finally:
        for buffer, values in before:
            buffer.data.copy_(values)


def _may_be_statistics(buffer: torch.Tensor) -> bool:
    """Tell whether batch_norm may write to a buffer, which it does without counting."""
    return (
        type(buffer) is torch.Tensor and buffer.dim() == 1 and buffer.is_floating_point() and not buffer.is_inference()
    )


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    strided = one.layout is other.layout is torch.strided
    return strided and one.device == other.device and storage_key(one) == storage_key(other)


def _held_by(module: nn.Module) -> tuple[dict[str, Any], ...]:
    attributes = module.__dict__
    return attributes, attributes["_buffers"], attributes["_parameters"], attributes["_modules"]


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
