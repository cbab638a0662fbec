"""What the modules of a region carry: attributes, buffers, parameters. A replay finds them as the forward did."""

import copy
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice, repeat
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

from memopt.errors import ReplayError, SavedTensorModifiedError
from memopt.runtime.replay.arguments import differs, version_of, versions_of
from memopt.runtime.replay.contents import Contents
from memopt.runtime.replay.hooks import HookDicts
from memopt.runtime.replay.owners import TORCH_ITSELF, Owner
from memopt.tensors import storage_key

_COUNTER = "num_batches_tracked"
"""Of a BatchNorm, which may run in some calls only."""
_STATISTICS = ("running_mean", "running_var")
"""Of a BatchNorm, which saves them, and then writes to them without counting."""

_HELD = ("_buffers", "_parameters", "_modules")
"""The dicts in which a module carries what are not plain attributes."""
_OF_TORCH = itemgetter("training", *_HELD, "_forward_pre_hooks", "_forward_hooks")

Buffer = tuple[str, str]
"""(module, buffer), by name. A tensor that is a plain attribute counts as a buffer here."""


class Snapshot:
    """What the modules of a region carry by reference; the calls of the region share it as long as it holds."""

    def __init__(self, module: nn.Module) -> None:
        self.owners = tuple(Owner(name, child) for name, child in module.named_modules())
        self.parameters = tuple(p for owner in self.owners for p in owner.parameters.values() if p is not None)
        self.plain_parameters = tuple(p for p in self.parameters if _stays_in_place(p))
        self.odd_parameters = tuple(p for p in self.parameters if not _stays_in_place(p))
        self.buffers = tuple((owner, key, b) for owner in self.owners for key, b in owner.tensors())
        self.statistics = frozenset(storage_key(b) for _, key, b in self.buffers if key in _STATISTICS)
        self.contents = Contents(v for o in self.owners for k, v in o.attributes.items() if k not in TORCH_ITSELF)
        self.generators = self.contents.generators
        self.is_lasting = all(p.is_leaf for p in self.parameters)
        """Whether it may be kept beyond a call: with it a graph would be kept that made the parameters."""
        plain = [owner for owner in self.owners if owner.is_plain]
        self._modules = [weakref.ref(owner.module) for owner in plain]
        self._attributes = [owner.module.__dict__ for owner in plain]
        self._nums_of_torch = [owner.num_of_torch for owner in plain]
        dicts = [attributes[name] for attributes in self._attributes for name in _HELD]
        self._filled = [held for held in dicts if held]
        self._empty = [held for held in dicts if not held]
        self.hooks = HookDicts(module)
        self._carried, self._names = self._carried_now(), self._names_now()

    def modules(self) -> Iterator[nn.Module]:
        """Yield the modules."""
        return (owner.module for owner in self.owners)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the parameters, the buffers and the tensors among the attributes."""
        yield from self.parameters
        yield from (buffer for _, _, buffer in self.buffers)

    def holds(self) -> bool:
        """Tell whether the modules carry the very same objects still, under the same names."""
        attributes = [vars(module()) for module in self._modules]
        if any(self._empty) or not all(map(is_, attributes, self._attributes)):
            return False
        now = self._carried_now()
        holds = len(now) == len(self._carried) and all(map(is_, now, self._carried))
        return holds and self._names_now() == self._names and self.contents.holds()

    def resembles(self, other: "Snapshot") -> bool:
        """Tell whether the modules carry what they did in another, but for tensors in the place of tensors: data."""
        alike = len(self._carried) == len(other._carried) and self._names == other._names
        if not alike or not other.contents.holds():
            return False
        pairs = zip(self._carried, other._carried, strict=True)
        return all(one is another or (_is_data(one) and _is_data(another)) for one, another in pairs)

    def let_go(self) -> None:
        """Never hold again: what the modules carried may have a graph, and only the owners are rid of it."""
        self._carried = []

    def _carried_now(self) -> list[Any]:
        """Return what the modules carry, in order. No loop of Python's: this is in every call."""
        attributes = map(islice, map(dict.values, self._attributes), self._nums_of_torch, repeat(None))
        parts = chain(map(_OF_TORCH, self._attributes), attributes, map(dict.values, self._filled))
        return [*chain.from_iterable(parts)]

    def _names_now(self) -> list[Any]:
        """Return how many attributes each module has, and the names of all."""
        attributes = map(islice, self._attributes, self._nums_of_torch, repeat(None))
        dicts = (*self._attributes, *self._filled)
        return [*map(len, dicts), *chain.from_iterable(chain(attributes, self._filled))]


class Attributes:
    """The state of a region's modules when it was entered."""

    def __init__(self, snapshot: Snapshot, parameters: Iterable[nn.Parameter] = ()) -> None:
        self.snapshot = snapshot
        self.parameters = (*snapshot.plain_parameters, *snapshot.odd_parameters, *parameters)
        self._parameters = self._parameters_now()
        self._buffer_versions = versions_of([b for _, _, b in snapshot.buffers])
        self._clones: dict[Buffer, torch.Tensor] = {}

    def are_as_then(self) -> bool:
        """Tell whether there is nothing to put back, nor a parameter that was written to."""
        return self.has_parameters_as_then() and self.snapshot.holds()

    def has_parameters_as_then(self) -> bool:
        """Tell whether nothing has happened to the parameters."""
        return self._parameters == self._parameters_now()

    def _parameters_now(self) -> list[tuple[int, bool, int]]:
        """Return what could happen to each parameter: the version, whether it needs a gradient, the storage."""
        plain = self.snapshot.plain_parameters
        others = self.parameters[len(plain) :]
        try:
            now = [(p._version, p.requires_grad, p.untyped_storage()._cdata) for p in plain]
        except RuntimeError:  # one was made in inference mode
            now = [(version_of(p), p.requires_grad, storage_key(p)) for p in plain]
        return now + [(version_of(p), p.requires_grad, 0) for p in others] if others else now

    def clone(self, buffers: Collection[Buffer] | None) -> None:
        """Copy the buffers that the region is known to write to; all of them for None."""
        for owner, key, buffer in self.snapshot.buffers:
            if buffers is None or (owner.name, key) in buffers or key == _COUNTER:
                self._clones[owner.name, key] = buffer.detach().clone().requires_grad_(buffer.requires_grad)

    def settle(self) -> bool:
        """Tell whether the region has left its modules with all they carried; if not, keep what that was, and no graph."""
        if self.snapshot.holds():
            return True
        self.snapshot = copy.copy(self.snapshot)
        self.snapshot.owners = tuple(owner.without_graphs() for owner in self.snapshot.owners)
        self.snapshot.let_go()
        self._let_go_of_replaced()
        return False

    def close(self, *, learns: bool) -> frozenset[Buffer]:
        """Let go of copies that are not needed, and return the buffers that the region wrote to."""
        if learns:
            self._drop_clones()
        return frozenset((owner.name, key) for owner, key, _ in self._changed_buffers())

    def check_parameters(self, fqn: str) -> None:
        """Raise an error if a parameter is not what the forward used.

        ReplayError where other data was put into it, since autograd, which still has the old, would not mind.
        """
        if (now := self._parameters_now()) == self._parameters:
            return
        changed = list(zip(self.parameters, self._parameters, now, strict=True))
        for parameter, (version, *_), (version_now, *_) in changed:
            if version_now != version:
                raise SavedTensorModifiedError(fqn, tuple(parameter.shape), version, version_now, what="a parameter of")
        for parameter, (*_, storage), (*_, storage_now) in changed:
            if storage_now != storage:
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
            for _, key, other in self.snapshot.buffers:
                if other is not buffer and _share_memory(buffer, other):
                    raise ReplayError(fqn, f"needs {key!r} as it was, of which the forward wrote to a view")
        for (owner, key, buffer), version in zip(self.snapshot.buffers, self._buffer_versions, strict=True):
            if (now := version_of(buffer)) != version and (owner.name, key) not in self._clones:
                raise SavedTensorModifiedError(fqn, tuple(buffer.shape), version, now, what="a buffer of")

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put the modules into the state of the entry for a while, and back into what they are now."""
        now = then = self.snapshot.owners
        try:
            if not self.snapshot.holds():
                now = tuple(Owner(owner.name, owner.module) for owner in then)
                memo: dict[int, Any] = {}
                for owner in then:
                    owner.put()
                    owner.put_contents(self.snapshot.contents, memo)
            again: dict[int, torch.Tensor] = {}
            for owner, key, buffer in self._changed_buffers():
                if id(buffer) not in again:  # one tensor may have several names
                    again[id(buffer)] = self._clones[owner.name, key].clone()
                owner.carry(key, again[id(buffer)])
            with (
                self._frozen_as_then(),
                _put_back(b for _, _, b in self.snapshot.buffers if id(b) not in again and _may_be_statistics(b)),
            ):
                yield
        finally:
            if now is not then or not self.snapshot.holds():
                for owner, other in zip(now, then, strict=True):
                    owner.put(after=other)

    @contextmanager
    def _frozen_as_then(self) -> Iterator[None]:
        """Let those parameters need gradients that did so in the forward."""
        pairs = zip(self.parameters, self._parameters, strict=True)
        changed = [(p, then) for p, (_, then, _) in pairs if p.is_leaf and p.requires_grad != then]
        try:
            for parameter, then in changed:
                parameter.requires_grad_(then)
            yield
        finally:
            for parameter, then in changed:
                parameter.requires_grad_(not then)

    def _let_go_of_replaced(self) -> None:
        """Forget the buffers in whose place the forward put others: those may descend from them, graph and all."""
        entries = zip(self.snapshot.buffers, self._buffer_versions, strict=True)
        kept = [(entry, version) for entry, version in entries if entry[0].carries(entry[1], entry[2])]
        self.snapshot.buffers = tuple(entry for entry, _ in kept)
        self._buffer_versions = [version for _, version in kept]
        names = {(owner.name, key) for owner, key, _ in self.snapshot.buffers}
        self._clones = {name: clone for name, clone in self._clones.items() if name in names}

    def _drop_clones(self) -> None:
        """Let go of the copies of buffers that hold the same values still."""
        for (owner, key, buffer), version in zip(self.snapshot.buffers, self._buffer_versions, strict=True):
            if not differs(buffer, version, self._clones[owner.name, key]):
                del self._clones[owner.name, key]

    def _changed_buffers(self) -> "Iterator[tuple[Owner, str, torch.Tensor]]":
        for entry, version in zip(self.snapshot.buffers, self._buffer_versions, strict=True):
            owner, key, buffer = entry
            if (owner.name, key) in self._clones or version_of(buffer) != version:
                yield entry


def _stays_in_place(parameter: torch.Tensor) -> bool:
    """Tell whether a parameter keeps its storage from forward to backward; DeepSpeed's are gathered into new ones."""
    return type(parameter) is nn.Parameter and parameter.layout is torch.strided and not hasattr(parameter, "ds_id")


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


def _is_data(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    strided = one.layout is other.layout is torch.strided
    return strided and one.device == other.device and storage_key(one) == storage_key(other)
