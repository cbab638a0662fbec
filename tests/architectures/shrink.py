"""Make a tiny model of any class of transformers: one rule for all, and a few fields for those that want more."""

import copy

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from tests import zoo
from tests.architectures.fields import FIELDS
from tests.architectures.newer_fields import NEWER_FIELDS
from tests.architectures.vision_fields import VISION_FIELDS
from tests.architectures.vision_kernels import declared_kernels

KERNELS = declared_kernels()
VOCAB = 128

_WIDTHS = (
    "hidden_size", "d_model", "n_embd", "dim_model", "emb_dim", "embedding_dim", "embedding_size", "lru_width",
    "out_hidden_size", "output_hidden_size", "word_embed_proj_dim", "attention_hidden_size", "input_embedding_size",
    "output_embedding_size", "embed_dim", "projection_dim", "hidden_dim",
    "encoder_hidden_size",
)  # fmt: skip
_INNER_WIDTHS = (
    "intermediate_size", "ffn_dim", "dim_ff", "dff", "d_inner", "ffn_hidden_size", "feed_forward_size", "n_inner",
    "encoder_ffn_dim", "decoder_ffn_dim", "intermediate_size_mlp", "dense_intermediate_size", "shared_intermediate_size",
    "mlp_dim",
)  # fmt: skip
_EXPERT_WIDTHS = (
    "moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
    "expert_ffn_hidden_size",
)  # fmt: skip
_DEPTHS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers", "decoder_layers",
    "num_encoder_layers", "num_decoder_layers", "num_blocks", "conf_num_hidden_layers", "layers",
)  # fmt: skip
_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads",
    "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads", "swa_num_attention_heads",
    "conf_num_attention_heads", "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "n_mamba_heads",
    "linear_num_heads",
)  # fmt: skip
_PAIRS = (
    "num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads", "linear_num_key_heads", "num_experts_per_tok",
    "num_experts_per_token", "moe_k", "moe_topk", "n_group", "index_n_heads", "moe_num_active_primary_experts",
)  # fmt: skip
_HEAD_DIMS = (
    "head_dim", "d_kv", "d_head", "dim_head", "swa_head_dim", "global_head_dim", "attention_head_size", "v_head_dim",
    "qk_nope_head_dim", "qk_rope_head_dim", "index_head_dim", "linear_key_head_dim", "linear_value_head_dim",
    "linear_head_dim", "rotary_dim", "kv_channels", "attention_head_dim", "swa_v_head_dim",
)  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num")
_RANKS = ("q_lora_rank", "kv_lora_rank", "o_lora_rank", "mamba_d_head", "mamba_head_dim", "mamba_headdim")
_STATES = (
    "state_size",
    "ssm_state_size",
    "mamba_d_state",
    "adapter_rank",
    "laurel_rank",
    "time_step_rank",
    "hc_lowrank",
)
_CHUNKS = ("chunk_size", "mamba_chunk_size", "attention_chunk_size", "conf_attention_chunk_size")
_WINDOWS = ("sliding_window", "sliding_window_size", "local_attention", "attention_window_size", "window_size")

SMALL = {
    **dict.fromkeys(("entity_vocab_size", "pronunciation_vocab_size", "shape_vocab_size"), VOCAB),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "audio_vocab_size"), VOCAB),
    **dict.fromkeys(_WIDTHS, 32),
    **dict.fromkeys(_INNER_WIDTHS, 48),
    **dict.fromkeys(_EXPERT_WIDTHS, 16),
    **dict.fromkeys(_DEPTHS, 2),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_PAIRS, 2),
    **dict.fromkeys(_HEAD_DIMS, 8),
    **dict.fromkeys(_EXPERTS, 4),
    **dict.fromkeys(_RANKS, 16),
    **dict.fromkeys(_STATES, 4),
    **dict.fromkeys(_CHUNKS, 8),
    **dict.fromkeys(_WINDOWS, 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions", "max_seq_len"), 64),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups", "topk_group", "first_k_dense_replace"), 1),
    "hidden_size_per_layer_input": 8,
    "index_topk": 4,
    "mm_tokens_per_image": 4,
    "image_size": 16,
    "patch_size": 8,
    "max_source_positions": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    **dict.fromkeys(("image_token_id", "image_token_index"), zoo.IMAGE),
    **dict.fromkeys(("video_token_id", "video_token_index"), zoo.VIDEO),
    **dict.fromkeys(("vision_start_token_id", "image_start_token_id"), zoo.VISION_START),
    **dict.fromkeys(("vision_end_token_id", "image_end_token_id"), zoo.VISION_END),
    **dict.fromkeys(("audio_token_id", "audio_token_index"), zoo.SOUND),
}
"""What a field of a configuration is made, if the class has one of that name and it is larger (or no number yet)."""


def tiny_config(cls: type) -> PreTrainedConfig:
    """Return a small configuration of a model class: its default one, shrunk, with the class's own fields on top."""
    own = (FIELDS | VISION_FIELDS | NEWER_FIELDS).get(cls.__name__, {})
    return cls.config_class(**copy.deepcopy(_merged(_small_fields(cls.config_class), own)))  # some take it apart


def tiny_model(cls: type) -> torch.nn.Module:
    """Return a tiny model in train mode with seeded weights, none of them zero or unset."""
    torch.manual_seed(0)
    config = tiny_config(cls)
    torch.use_deterministic_algorithms(True)  # what a class leaves unset is then NaN
    try:
        model = cls(config).train()
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and (not p.any() or not p.isfinite().all()):
                p.normal_(std=0.02)
    return model


def class_named(name: str) -> type:
    return getattr(transformers, name)


def _small_fields(config_class: type) -> dict[str, object]:
    """Return what makes a configuration small, those inside of it included."""
    if getattr(config_class, "has_no_defaults_at_init", False):  # newer versions have defaults for all
        return {}
    try:
        default = config_class()
    except StrictDataclassError:  # it refuses its own defaults
        return {}
    found = {key: value for key, value in vars(default).items() if not key.startswith("_")}
    small = {key: SMALL[key] for key, value in found.items() if key in SMALL and _is_larger(key, value)}
    if "kv_lora_rank" in found and "num_key_value_heads" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]  # latent attention has no groups
    inner = {key: type(value) for key, value in found.items() if isinstance(value, PreTrainedConfig)}
    for key, cls in inner.items():
        small[key] = _small_fields(cls)
        if cls.model_type:
            small[key]["model_type"] = cls.model_type
    return small


def _is_larger(key: str, value: object) -> bool:
    if key.endswith(("_token_id", "_token_index")):
        return value is not None
    return isinstance(value, int) and not isinstance(value, bool) and value > SMALL[key]


def _merged(base: dict, own: dict) -> dict:
    both = base | own
    for key, value in own.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            both[key] = _merged(base[key], value)
    return both
