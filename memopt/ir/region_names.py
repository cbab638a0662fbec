"""The names by which transformers' models register the parts of a layer, and the autograd nodes of its products."""

ATTENTION = frozenset(
    {
        "self_attn", "self_attention", "attention", "attn", "encoder_attn", "cross_attn", "crossattention",
        "SelfAttention", "EncDecAttention",
    }
)  # fmt: skip
BERT_UP, BERT_DOWN = "intermediate", "output"
MLP = frozenset({"mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "DenseReluDense", BERT_UP, BERT_DOWN})
ATTENTION_NORMS = frozenset(
    {
        "input_layernorm", "attention_norm", "layer_norm1", "norm1", "ln_1", "self_attn_layer_norm", "layernorm_before",
        "attn_norm", "input_norm", "pre_attention_layernorm", "layer_norm", "encoder_attn_layer_norm",
    }
)  # fmt: skip
MLP_NORMS = frozenset(
    {
        "post_attention_layernorm", "ffn_norm", "layer_norm2", "norm2", "ln_2", "final_layer_norm", "layernorm_after",
        "pre_feedforward_layernorm", "post_feedforward_layernorm", "mlp_norm", "pre_mlp_layernorm", "post_mlp_layernorm",
        "pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "mlp_layernorm",
        "pre_ff_layernorm",
    }
)  # fmt: skip
PROJECTIONS_IN = frozenset(
    {
        "q_proj", "k_proj", "v_proj", "qkv_proj", "qkv", "query", "key", "value", "query_key_value", "c_attn", "q_attn",
        "Wqkv", "in_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "kv_a_proj", "W_pack", "wq", "wk",
        "wv", "q_lin", "k_lin", "v_lin", "q", "k", "v",
    }
)  # fmt: skip
PROJECTIONS_OUT = frozenset({"o_proj", "out_proj", "c_proj", "dense", "wo", "proj", "out_lin", "Wo", "o"})
FIRST_LINEAR = frozenset(
    {
        "gate_proj", "up_proj", "gate_up_proj", "fc1", "c_fc", "dense_h_to_4h", "wi", "wi_0", "wi_1", "w1", "w3", "lin1",
        "fc_in", "Wi", "linear_fc1",
    }
)  # fmt: skip
LAST_LINEAR = frozenset(
    {"down_proj", "fc2", "c_proj", "dense_4h_to_h", "wo", "w2", "lin2", "fc_out", "Wo", "linear_fc2"}
)
ACTIVATIONS = frozenset({"act", "act_fn", "activation_fn", "activation", "activation_func"})
ROUTERS = frozenset({"gate", "router", "wg"})
SHARED = frozenset({"shared_expert", "shared_experts", "shared_expert_gate", "shared_mlp"})
EXPERTS = "experts"
PLACES = ATTENTION | MLP | ATTENTION_NORMS | MLP_NORMS | {EXPERTS}
"""By which of them comes first in a path, a save is known to lie in attention, MLP or norm."""
CORE = ("ScaledDotProduct", "Flash", "Flex", "Bmm", "Baddbmm", "Softmax", "Efficient", "Cudnn", "_compiled_flex")
MATMULS = ("Mm", "Addmm", "Bmm", "Baddbmm", "GroupedMm", "Linear", "grouped_mm")
