"""The parts of a layer that can be checkpointed one by one (RFC "activation checkpoint")."""

from memopt.ir.graph import ModuleGraph

PARTS = (
    ("mlp", ("mlp", "feed_forward", "ffn")),
    ("attention", ("self_attn", "attention", "attn", "linear_attn")),
    ("norm 1", ("input_layernorm", "attention_norm", "layer_norm1", "norm1")),
    ("norm 2", ("post_attention_layernorm", "ffn_norm", "layer_norm2", "norm2")),
    ("extra", ("mlp_moe_gen",)),
    ("extra", ("input_layernorm_moe_gen",)),
    ("extra", ("post_attention_layernorm_moe_gen",)),
)
"""Role and the names it may be registered under, the first that is there counts."""
COMPILED = ("mlp", "attention")


def layer_parts(graph: ModuleGraph, layer_fqn: str, *, compiled: bool) -> tuple[tuple[str, str], ...]:
    """Return role and FQN of a layer's parts, those that pay under compile only where it is `compiled`.

    A child that has two names is one part; where no child has a known name there are none.
    """
    parts: dict[str, str] = {}
    for role, names in PARTS:
        children = (graph.by_fqn.get(f"{layer_fqn}.{name}") for name in names)
        part = next((child for child in children if child), None)
        if part and not (compiled and role not in COMPILED):
            parts.setdefault(part.fqn, role)
    return tuple((role, fqn) for fqn, role in parts.items())
