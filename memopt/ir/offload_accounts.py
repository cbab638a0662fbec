"""The sums that stand for offload: of a group, of a recomputed part, of a layer, of all."""

from dataclasses import dataclass

from memopt.ir.plan import Action, RegionKey


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAccount:
    """One region of one layer, or one module that matched a pattern."""

    key: RegionKey
    action: Action
    why: str
    num_tensors: int
    """How many copies go out."""
    moved_bytes: int
    duplicate_bytes: int
    """Of its saves that another group, or an earlier layer, has moved already."""
    kept: tuple[tuple[str, int], ...]
    """(reason, bytes) of the storages of it that stay, each for the reason of its first save there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeAccount:
    """One part that is recomputed and whose output is not kept either, over all its calls."""

    key: RegionKey
    why: str
    num_calls: int
    dropped_bytes: int
    """Of what is saved inside of it without the plan, its inputs left out."""
    output_bytes: int
    """Of its outputs that others in its layer save without the plan: they save how to make them."""
    input_bytes: int
    """Of what it is called with: held for the replay, or offloaded."""
    replay_bytes: int
    """What backward makes again at once, in the call that makes most."""
    flops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShare:
    """How much of what is saved in one layer leaves the device."""

    fqn: str
    saved_bytes: int
    gone_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadAccount:
    """All groups and recomputed parts, and what is on the device between forward and backward."""

    groups: tuple[GroupAccount, ...]
    """In forward order."""
    recipes: tuple[RecipeAccount, ...]
    layers: tuple[LayerShare, ...]
    """Of those that have a group or a recomputed part."""
    moved_bytes: int
    """What will be copied out: what the engine counts in one step."""
    num_tensors: int
    duplicate_bytes: int
    dropped_bytes: int
    output_bytes: int
    input_bytes: int
    replay_bytes: int
    repeated_flops: int
    saved_bytes: int
    """Of all activations without the plan, each storage once."""
    freed_bytes: int
    """Of these, what leaves the device."""
    moved_freed_bytes: int
    """Of what leaves, what is copied out; backward makes the rest again."""
    added_bytes: int
    """What is on the device with the plan and not without it: what parts are called with."""
    stays: tuple[tuple[str, int], ...]
    """(reason, bytes) of all that is on the device between forward and backward, the largest first."""
