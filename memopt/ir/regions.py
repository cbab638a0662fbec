"""The named parts of a layer: which of its saved tensors belong to which region, by who saved them and in what order.

Plan and runtime ask the same function, about what was traced and about what is saved, so that they cannot disagree.
Source: the modules of Megatron-LM's fine-grained activation offloading, read for transformers' layers.
"""

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import NamedTuple

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
ALL_REGIONS = (*REGIONS, FUSED_GROUP_MLP)

_ATTENTION = frozenset(
    {"self_attn", "self_attention", "attention", "attn", "encoder_attn", "cross_attn", "crossattention"}
)
_MLP = frozenset({"mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "intermediate", "output"})
_ATTENTION_NORMS = frozenset(
    {
        "input_layernorm", "attention_norm", "layer_norm1", "norm1", "ln_1", "self_attn_layer_norm", "layernorm_before",
        "attn_norm", "input_norm", "pre_attention_layernorm", "layer_norm", "encoder_attn_layer_norm",
    }
)  # fmt: skip
_MLP_NORMS = frozenset(
    {
        "post_attention_layernorm", "ffn_norm", "layer_norm2", "norm2", "ln_2", "final_layer_norm", "layernorm_after",
        "pre_feedforward_layernorm", "post_feedforward_layernorm", "mlp_norm", "pre_mlp_layernorm", "post_mlp_layernorm",
        "pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "mlp_layernorm",
    }
)  # fmt: skip
_PROJECTIONS_IN = frozenset(
    {
        "q_proj", "k_proj", "v_proj", "qkv_proj", "qkv", "query", "key", "value", "query_key_value", "c_attn", "q_attn",
        "Wqkv", "in_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "kv_a_proj", "W_pack", "wq", "wk",
        "wv", "q_lin", "k_lin", "v_lin",
    }
)  # fmt: skip
_PROJECTIONS_OUT = frozenset({"o_proj", "out_proj", "c_proj", "dense", "wo", "proj", "out_lin", "Wo"})
_FIRST_LINEAR = frozenset(
    {
        "gate_proj", "up_proj", "gate_up_proj", "fc1", "c_fc", "dense_h_to_4h", "wi", "wi_0", "wi_1", "w1", "w3", "lin1",
        "fc_in", "Wi", "linear_fc1",
    }
)  # fmt: skip
_LAST_LINEAR = frozenset(
    {"down_proj", "fc2", "c_proj", "dense_4h_to_h", "wo", "w2", "lin2", "fc_out", "Wo", "linear_fc2"}
)
ACTIVATIONS = frozenset({"act", "act_fn", "activation_fn", "activation", "activation_func"})
"""What the activation of an MLP is registered as."""
_ROUTERS = frozenset({"gate", "router", "wg"})
_SHARED = frozenset({"shared_expert", "shared_experts", "shared_expert_gate", "shared_mlp"})
_EXPERTS = "experts"
_CORE = ("ScaledDotProduct", "Flash", "Flex", "Bmm", "Baddbmm", "Softmax", "Efficient", "Cudnn", "_compiled_flex")
_MATMULS = ("Mm", "Addmm", "Bmm", "Baddbmm", "GroupedMm", "Linear", "grouped_mm")


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
    in_moe = any(_EXPERTS in save.owner.split(".") for save in saves)
    order = _Order()
    return [_claim(save.owner, claimed) or _region(save, order, in_moe=in_moe) for save in saves]


class _Order:
    """How far the forward has come where only the order of saves tells regions apart."""

    def __init__(self) -> None:
        self._cores: set[str] = set()
        self._runs: dict[str, tuple[int, bool]] = {}

    def is_core(self, attention: str, node: str) -> bool:
        """Tell whether a save of attention itself comes with or after its first operation on all three."""
        if node.startswith(_CORE):
            self._cores.add(attention)
        return attention in self._cores

    def linear(self, experts: str, node: str) -> tuple[int, bool]:
        """Return how many runs of matrix products began in a block of experts, and whether one is under way."""
        count, was_matmul = self._runs.get(experts, (0, False))
        is_matmul = _is_matmul(node)
        self._runs[experts] = count + (is_matmul and not was_matmul), is_matmul
        return self._runs[experts]


def _claim(owner: str, claimed: tuple[str, ...]) -> str:
    for path in claimed:
        if not path or owner == path or owner.startswith(f"{path}."):
            return MODULE + path
    return ""


def _region(save: Save, order: _Order, *, in_moe: bool) -> str:
    names = save.owner.split(".")
    first = names[0]
    if first in _ATTENTION_NORMS:
        return "attn_norm"
    if first in _MLP_NORMS:
        return "mlp_norm"
    if any(name in _SHARED for name in names):
        return "shared_expert"
    if first in _ATTENTION:
        return _in_attention(save, names, order)
    if _EXPERTS in names:
        return _in_experts(save, names, order)
    if any(name in _ROUTERS for name in names[:2]) and in_moe:
        return "router"
    return _in_mlp(names, in_moe=in_moe)


def _in_attention(save: Save, names: list[str], order: _Order) -> str:
    if any(name in _PROJECTIONS_IN for name in names):
        return "qkv_linear"
    if any("norm" in name.lower() for name in names[1:]):
        return "qk_norm"
    if any(name in _PROJECTIONS_OUT for name in names):
        return "attn_proj"
    return "core_attn" if order.is_core(names[0], save.node) else ""


def _in_experts(save: Save, names: list[str], order: _Order) -> str:
    """Tell by name where every expert is a module, else by the order: products, activation, products, and again."""
    if any(name in _FIRST_LINEAR for name in names):
        return "expert_fc1"
    if any(name in _LAST_LINEAR for name in names):
        return "moe_fc2"
    experts = ".".join(names[: names.index(_EXPERTS) + 1])
    count, is_matmul = order.linear(experts, save.node)
    if count % 2:
        return "expert_fc1" if is_matmul else "moe_act"
    return "moe_fc2" if count else "expert_fc1"


def _in_mlp(names: list[str], *, in_moe: bool) -> str:
    if any(name in _FIRST_LINEAR for name in names):
        return "mlp_fc1"
    if any(name in _LAST_LINEAR for name in names):
        return "mlp_fc2"
    if names[0] not in _MLP and names[0] not in ACTIVATIONS:
        return ""
    return "router" if in_moe else "mlp_act"


def _is_matmul(node: str) -> bool:
    """Tell whether a node is a matrix product, fused ones included."""
    return any(node.startswith(name) for name in _MATMULS) or "grouped_mm" in node.lower()
