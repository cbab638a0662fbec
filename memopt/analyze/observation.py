"""What is noted while one training forward runs; `build` makes a ModuleGraph of it."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memopt.ir.graph import Kind
from memopt.ir.op_policy import Family
from memopt.tensors import Source


@dataclass(slots=True)
class Call:
    """One module call while it is being observed."""

    index: int
    fqn: str
    parent: int | None
    first_save: int
    inputs: dict[int, int]
    """Storage -> bytes."""
    flops_before: int
    outputs: dict[int, int] = field(default_factory=dict)
    """Storage -> bytes."""
    end_save: int = -1
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """One call of a part of a module's forward that is a method of its own."""

    region: str
    call: int
    first_save: int
    end_save: int
    inputs: dict[int, int]
    """Storage -> bytes."""
    outputs: dict[int, int]
    """Storage -> bytes."""


@dataclass(slots=True, kw_only=True)
class Function:
    """One call of an expensive function."""

    family: Family
    call: int
    first_save: int
    end_save: int
    flops: int
    outputs: tuple[torch.Tensor, ...]
    """Without their graph; they share the version counters of what the model got."""
    versions: tuple[int, ...]
    """Of the outputs when it returned."""
    statistics: dict[int, int]
    """Storage -> bytes of what it saved besides its operands and its outputs."""
    keepable: bool
    """Whether its results can stand for it, unless someone writes to them later."""


class Ticket:
    """What the pack hook returns; it lives as long as autograd holds the save."""

    __slots__ = ("__weakref__", "index")

    def __init__(self, index: int) -> None:
        self.index = index


@dataclass(slots=True)
class Save:
    """One save while it is being observed."""

    tensor: torch.Tensor
    call: int
    kind: Kind
    requires_grad: bool
    ticket: "weakref.ref[Ticket]"
    is_operand: bool
    """Whether the expensive function that saved it was given it."""
    cast_of: int | None = None
    """The storage, returned by a call, that it is a cast of."""
    node: str = "Unknown"
    field: str = "?"


@dataclass(slots=True)
class Observation:
    """Everything that was noted in one forward."""

    flops: Callable[[], int] = lambda: 0
    """Return how many floating-point operations were asked for up to now; a run on real tensors does not count them."""
    calls: list[Call] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    flows: dict[tuple[int, int], None] = field(default_factory=dict)
    makers: dict[int, tuple[StorageWeakRef, int | None]] = field(default_factory=dict)
    """Storage -> (weak reference, so that its address is not given to another storage; call that made it)."""
    num_without_storage: int = 0
    """How many saves are left out because they have no storage of their own: sparse tensors."""
    asked_for_choices: bool = False
    """Whether shapes or branches rest on the assumption that routers choose evenly."""
    held: set[int] = field(default_factory=set)
    checkpointed: dict[str, None] = field(default_factory=dict)
    """FQNs of the modules that were called inside of torch's checkpoint."""
    output: Any = None
    returned: list[tuple[torch.Tensor, int, dict[int, int]]] = field(default_factory=list)
    """(a tensor that a call returned, without its graph; its version then; the results of the call that it is among)."""
    returned_by: dict[Source, int] = field(default_factory=dict)
    """What a call returned, as the graph knows it -> storage."""
    active: list[Call] = field(default_factory=list)
    operands: list[torch.Tensor] = field(default_factory=list)
    """Of the expensive function that is being called."""
