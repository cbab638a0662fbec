"""The named parts of a layer: which of its saved tensors belong to which region, by who saved them and in what order.

Plan and runtime ask the same function, about what was traced and about what is saved, so that they cannot disagree.
Source: the modules of Megatron-LM's fine-grained activation offloading, read for transformers' layers.
"""

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import NamedTuple

from memopt.ir.region_names import (
    ACTIVATIONS,
    ATTENTION,
    ATTENTION_NORMS,
    BERT_DOWN,
    BERT_UP,
    CORE,
    EXPERTS,
    FIRST_LINEAR,
    LAST_LINEAR,
    MATMULS,
    MLP,
    MLP_NORMS,
    PLACES,
    PROJECTIONS_IN,
    PROJECTIONS_OUT,
    ROUTERS,
    SHARED,
)

REGIONS = MappingProxyType(
    {
        "attn_norm": "the norm before attention",
        "qkv_linear": "the projections to queries, keys and values",
        "qk_norm": "the norms of queries, keys and latents",
        "core_attn": "attention itself: queries, keys, values, output, statistics",
        "attn_proj": "the projection of attention's output",
        "mlp_norm": "the norm before the MLP",
        "mlp_fc1": "the first linear layers of a dense MLP",
        "mlp_act": "the activation of a dense MLP",
        "mlp_fc2": "the last linear layer of a dense MLP",
        "router": "the router of the experts",
        "expert_fc1": "the experts' first linear layers, with the tokens gathered for them",
        "moe_act": "the experts' activation",
        "moe_fc2": "the experts' last linear layers, and what joins their results",
        "shared_expert": "the experts that see all tokens",
    }
)
"""Name and meaning, in the order of a forward."""
FUSED_GROUP_MLP = "fused_group_mlp"
"""The whole block of experts as one region: what is expert_fc1, moe_act and moe_fc2 otherwise."""
FUSED_PARTS = ("expert_fc1", "moe_act", "moe_fc2")
MODULE = "module:"
"""The prefix of a region that is a module, named by a pattern; in a plan by its path from the decided module."""
METHODS = MappingProxyType({"moe_act": "_apply_gate"})
"""The regions that are methods of a module: all of transformers' fused experts have their activation in one."""
ALL_REGIONS = (*REGIONS, FUSED_GROUP_MLP)


class Save(NamedTuple):
    """One save of a layer, as far as its region is concerned."""

    owner: str
    """The path of the module that saved it, from the layer."""
    node: str = ""
    """The autograd node's name; empty for what a part that is recomputed was called with."""


def regions_in(saves: Sequence[Save], claimed: Iterable[str] = ()) -> list[str]:
    """Return the region of each save of a layer's call, given in order; empty for those of no region.

    `claimed` are paths of modules from the layer: what is saved in one is in the region ``module:PATH``.
    """
    claimed = tuple(claimed)
    order = _Order(saves)
    regions = [order.region(save) for save in saves]  # of claimed ones too: they tell how far the forward has come
    return [_claim(save.owner, claimed) or region for save, region in zip(saves, regions, strict=True)]


def _claim(owner: str, claimed: tuple[str, ...]) -> str:
    for path in claimed:
        if not path or owner == path or owner.startswith(f"{path}."):
            return MODULE + path
    return ""


class _Order:
    """The regions of saves one after another, where it needs to be known how far the forward has come."""

    def __init__(self, saves: Iterable[Save]) -> None:
        paths = (save.owner.split(".") for save in saves)
        self._moe = {tuple(path[: path.index(EXPERTS)]) for path in paths if EXPERTS in path}
        """The paths of the blocks that have experts."""
        self._cores: set[str] = set()
        """The attentions whose first operation on queries, keys and values has come."""
        self._linears: dict[str, str] = {}
        """Of a block of experts, the region of its last matrix product."""
        self._was_matmul = False
        self._last = ""

    def region(self, save: Save) -> str:
        """Return the region of the next save."""
        self._last = self._region(save, save.owner.split("."))
        self._was_matmul = _is_matmul(save.node)
        return self._last

    def _region(self, save: Save, path: list[str]) -> str:
        names = _from_place(path)
        if names[0] in ATTENTION_NORMS:
            return "attn_norm"
        if names[0] in MLP_NORMS:
            return "mlp_norm"
        if any(name in SHARED for name in path):
            return "shared_expert"
        if names[0] in ATTENTION:
            return self._in_attention(save, names)
        if EXPERTS in path:
            return self._in_experts(save, path)
        return self._in_moe(path) or self._in_mlp(names)

    def _in_attention(self, save: Save, names: list[str]) -> str:
        if any(name in PROJECTIONS_IN for name in names):
            self._cores.discard(names[0])
            return "qkv_linear"
        if any(name in PROJECTIONS_OUT for name in names[1:]):
            return "attn_proj"
        if any("norm" in name.lower() for name in names[1:]):
            return "attn_norm" if BERT_DOWN in names else "qk_norm"
        if save.node.startswith(CORE):
            self._cores.add(names[0])
            return "core_attn"
        if self._last == "attn_proj":
            return self._last
        return "core_attn" if names[0] in self._cores else ""

    def _in_experts(self, save: Save, path: list[str]) -> str:
        """Tell by name where every expert is a module, else by the order: products, activation, products, and again."""
        experts = ".".join(path[: path.index(EXPERTS)])
        last = self._linears.get(experts, "")
        linear = _linear(path, "expert_fc1", "moe_fc2")
        if _is_matmul(save.node) and not linear:
            starts = not self._was_matmul
            linear = ("moe_fc2" if last == "expert_fc1" else "expert_fc1") if starts or not last else last
        if linear:
            self._linears[experts] = linear
            return linear
        return {"": "expert_fc1", "expert_fc1": "moe_act", "moe_fc2": "moe_fc2"}[last]

    def _in_moe(self, path: list[str]) -> str:
        """Return the region of what a block of experts does besides them; empty for what lies in none."""
        for block in self._moe:
            inside = path[len(block) :] if tuple(path[: len(block)]) == block else []
            if inside and inside[0] in ROUTERS:
                return "router"
            if block and tuple(path[: len(block)]) == block:
                return self._last if self._last in ("moe_fc2", "shared_expert") else "router"
        return ""

    def _in_mlp(self, names: list[str]) -> str:
        if linear := _linear(names, "mlp_fc1", "mlp_fc2"):
            return linear
        if names[0] == BERT_DOWN and "norm" in names[-1].lower():
            return "mlp_norm"
        if any(name in ACTIVATIONS for name in names):
            return "mlp_act" if names[0] in MLP | ACTIVATIONS else ""
        if not names[0] or "drop" in names[-1]:
            return self._last  # the layer's own, as a dropout before a residual: it ends what came before
        if names[0] in MLP:
            return "mlp_fc2" if self._last == "mlp_fc2" else "mlp_act"
        return ""


def _from_place(path: list[str]) -> list[str]:
    """Return a path without the modules around the attention, MLP or norm that it leads to."""
    start = next((number for number, name in enumerate(path) if name in PLACES), 0)
    return path[start:]


def _linear(names: list[str], first: str, last: str) -> str:
    """Return which of an MLP's linear layers a path leads to; empty for none."""
    if any(name in FIRST_LINEAR for name in names) or names[:2] == [BERT_UP, "dense"]:
        return first
    if any(name in LAST_LINEAR for name in names) or names[:2] == [BERT_DOWN, "dense"]:
        return last
    return ""


def _is_matmul(node: str) -> bool:
    """Tell whether a node is a matrix product, fused ones included."""
    return node.startswith(MATMULS) or "grouped_mm" in node.lower()
