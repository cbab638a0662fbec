"""What was measured of a model in one training forward: modules, their calls, and what autograd saved. Facts only."""

import enum
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from memopt.ir.op_policy import Family

if TYPE_CHECKING:
    import networkx


class Kind(enum.StrEnum):
    """What a saved tensor is to the model."""

    ACTIVATION = "activation"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    PARAMETER_CAST = "parameter cast"


class KvSharing(enum.StrEnum):
    """How layers use the keys and values of an earlier layer."""

    NONE = "none"
    CACHE = "cache"
    """Through the cache, which must stay on for it."""
    DICT = "dict"
    """Through an argument of the layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """One tensor that one autograd node saved for backward.

    The storage is the unit of memory, the tensor (shape, stride, offset, dtype) the unit of meaning.
    """

    index: int
    """Its place in the sequence of saves of the whole forward."""
    call: int
    """The innermost module call that was active, an index into `ModuleGraph.calls`."""
    owner: str
    """The FQN of that module."""
    node: str
    """The autograd node's name, e.g. ``MmBackward0``."""
    field: str
    """The node's field, e.g. ``self`` or ``saved_tensors[0]``."""
    occurrence: int
    """How many saves of this owner, node and field came before it in the same call of the owner."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """In elements."""
    dtype: str
    tensor_bytes: int
    storage: int
    """The identity of its storage within this graph."""
    storage_bytes: int
    requires_grad: bool
    cast_of: int | None = None
    """The storage that it is a cast of, where a module or a part returned that: autocast casts for each user anew."""
    kind: Kind
    maker: str | None
    """The FQN of the module call in which the storage was made; None for parameters, buffers and inputs."""

    @property
    def op(self) -> str:
        """The autograd node's name without its suffix: ``Mm`` for ``MmBackward0``."""
        return self.node.partition("Backward")[0]

    @property
    def role(self) -> str:
        """The name by which a decision and the runtime mean this tensor, whatever its position."""
        return f"{self.owner}:{self.node}.{self.field}#{self.occurrence}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """One call of one module; it owns the saves ``first_save <= index < end_save``, its children's included."""

    index: int
    fqn: str
    parent: int | None
    first_save: int
    end_save: int
    inputs: tuple[tuple[int, int], ...] = ()
    """(storage, bytes) of the tensors in its arguments, parameters and buffers left out."""
    outputs: tuple[tuple[int, int], ...] = ()
    """(storage, bytes) of the tensors that it returned, without parameters, buffers and what is written to later."""
    flops: int = 0
    """Of the operations in it that have any (torch's registry of formulas), its children's included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCall:
    """One call of a part of a module's forward that is a method of its own, as transformers' experts' activation is.

    It owns the saves ``first_save <= index < end_save``.
    """

    region: str
    """The name of the part, one of `memopt.ir.regions`."""
    call: int
    """The innermost module call that was active: that of the module whose method it is."""
    first_save: int
    end_save: int
    inputs: tuple[tuple[int, int], ...]
    """(storage, bytes) of the tensors in its arguments, parameters and buffers left out."""
    outputs: tuple[tuple[int, int], ...]
    """(storage, bytes) of the tensors that it returned, without parameters, buffers and what is written to later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """One call of one expensive function; it owns the saves ``first_save <= index < end_save``."""

    family: Family
    call: int
    """The innermost module call that was active."""
    first_save: int
    end_save: int
    outputs: tuple[tuple[int, int], ...]
    """(storage, bytes) of what it returned."""
    flops: int
    statistics: tuple[tuple[int, int], ...] = ()
    """(storage, bytes) of what it saved besides its operands and its results; small where it is keepable."""
    keepable: bool
    """Whether its results can stand for it in a replay: it saves only its operands, its results and small statistics,
    draws no random numbers, and nobody writes to its results later in the forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNode:
    """One submodule, in registration order; a shared module is one node under all its FQNs."""

    fqn: str
    fqns: tuple[str, ...]
    """All the names it is registered under, `fqn` first."""
    class_name: str
    bases: tuple[str, ...] = ()
    """The names of the classes that it inherits from, nearest first, up to `nn.Module`."""
    num_parameters: int
    """Its own, not its children's."""
    num_trainable: int = 0
    """How many of its own parameters need grad."""
    parameter_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Which model was traced."""

    name: str
    class_name: str
    num_parameters: int
    parameter_bytes: int
    transformers_version: str
    native_checkpointing: bool = False
    """Whether transformers' own gradient checkpointing can be switched on for it."""
    kv_sharing: KvSharing = KvSharing.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceInput:
    """What the model was traced with: each of these changes the list of what is saved."""

    batch_size: int
    seq_length: int
    dtype: str
    autocast: str
    attn_implementation: str
    target_device: str


@dataclass(frozen=True, kw_only=True)
class ModuleGraph:
    """A model's modules, calls, saved tensors and data flow in one training forward."""

    model: ModelFacts
    input: TraceInput
    modules: tuple[ModuleNode, ...]
    """Depth first in registration order, the root (FQN ``""``) first."""
    calls: tuple[ModuleCall, ...]
    """In the order in which they began."""
    saved: tuple[SavedTensor, ...]
    flows: tuple[tuple[int, int], ...]
    """(maker call, user call) wherever a tensor made in one module is used in another."""
    held: frozenset[int]
    """Storages that the caller holds anyway: the model's inputs and outputs."""
    functions: tuple[FunctionCall, ...] = ()
    """The expensive functions, in the order of their calls."""
    parts: tuple[PartCall, ...] = ()
    """The parts of forwards that are methods of their own, in the order of their calls."""
    checkpointed: tuple[str, ...] = ()
    """FQNs of the modules that the model's own forward calls inside of torch's checkpoint: of them nothing is saved."""
    notes: tuple[str, ...] = ()

    @cached_property
    def by_fqn(self) -> dict[str, ModuleNode]:
        """Every module under each of its FQNs."""
        return {fqn: node for node in self.modules for fqn in node.fqns}

    def calls_of(self, fqn: str) -> tuple[ModuleCall, ...]:
        """Return the calls of one module, in order."""
        return tuple(call for call in self.calls if call.fqn == fqn)

    def saved_in(self, fqn: str) -> tuple[SavedTensor, ...]:
        """Return what was saved inside one module, its children included, over all its calls."""
        return tuple(t for call in self.calls_of(fqn) for t in self.saved[call.first_save : call.end_save])

    def to_networkx(self) -> "networkx.DiGraph":
        """Return the graph of modules for graph questions.

        Nodes are FQNs with their `ModuleNode` as ``module``; edges have a ``kind``: ``contains`` (parent to child,
        with the ``names`` it is registered under, in registration order) or ``flows`` (maker to user). An edge that is
        both is ``contains`` and has ``flows=True``.
        """
        from memopt.ir.queries import as_networkx

        return as_networkx(self)
