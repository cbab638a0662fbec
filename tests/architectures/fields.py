"""The few fields, by class, that make it run where the rule of `shrink` alone does not, or that show more of it."""

_LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention"]}
_LINEAR_AND_SHARED = {
    "num_hidden_layers": 4, "num_key_value_heads": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "attention_head_dim": 16, "attention_hidden_size": 64,
}  # fmt: skip
_HEAD_DIM = {"head_dim": 8}
_ASSISTANT = {
    "backbone_hidden_size": 32,
    "text_config": {
        "model_type": "gemma4_text",
        "vocab_size": 128,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 8,
        "intermediate_size": 48,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "num_kv_shared_layers": 2,
    },
}

_BLOCKS = {"block_size": 2, "num_random_blocks": 1}
_T5 = {"decoder_start_token_id": 0}
_BERT = {
    "model_type": "bert", "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
_DECODER = _BERT | {"is_decoder": True, "add_cross_attention": True}
_STARTS = {"decoder_start_token_id": 1, "pad_token_id": 0}
_VIT = {
    "model_type": "vit", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
_REFORMER = {
    "axial_pos_embds": False, "attn_layers": ["local", "lsh"], "local_attn_chunk_length": 4,
    "lsh_attn_chunk_length": 4, "num_buckets": 2, "hash_seed": 0, "hidden_dropout_prob": 0.0,
    "local_attention_probs_dropout_prob": 0.0,  # each layer seeds its dropout by the clock
}  # fmt: skip

FIELDS: dict[str, dict] = {
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "BigBirdForCausalLM": _BLOCKS,
    "BigBirdForMaskedLM": _BLOCKS,
    "BigBirdPegasusForConditionalGeneration": _BLOCKS,
    "BltForCausalLM": {
        "encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4],
        "encoder_config": {"hidden_size_global": 32}, "decoder_config": {"hidden_size_global": 32},
    },
    "CohereCompassForCausalLM": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        },
    },
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8}},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    "Dots1ForCausalLM": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
    },
    "EncoderDecoderModel": {"encoder": _BERT, "decoder": _DECODER} | _STARTS,
    "EsmForMaskedLM": {"vocab_size": 128, "pad_token_id": 0, "mask_token_id": 3},
    "EsmcForMaskedLM": {"num_key_value_heads": 4, "vocab_size": 128},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "Gemma4AssistantForCausalLM": _ASSISTANT,
    "Gemma4UnifiedAssistantForCausalLM": _ASSISTANT,
    "Gemma3nForCausalLM": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": 48, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "GraniteMoeHybridForCausalLM": _LINEAR_AND_FULL,
    "HunYuanDenseV1ForCausalLM": _HEAD_DIM,
    "HunYuanMoEV1ForCausalLM": _HEAD_DIM,
    "JambaForCausalLM": {"attn_layer_period": 2, "expert_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 1},
    "LEDForConditionalGeneration": {"attention_window": [4, 4]},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "LongT5ForConditionalGeneration": _T5,
    "Mamba2ForCausalLM": {"num_heads": 4, "head_dim": 16},
    "MinistralForCausalLM": _HEAD_DIM,
    "NeoMMEForMaskedLM": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    },
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "ModernVBertForMaskedLM": {"pixel_shuffle_factor": 2},
    "PerceiverForMaskedLM": {
        "max_position_embeddings": 12, "d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4, "num_cross_attention_heads": 4, "qk_channels": 32, "v_channels": 32,
    },
    "Qwen3NextForCausalLM": _LINEAR_AND_FULL,
    "Qwen3_5ForCausalLM": _LINEAR_AND_FULL,
    "Qwen3_5MoeForCausalLM": _LINEAR_AND_FULL,
    "Qwen4ExpForCausalLM": {
        "layer_types": ["linear_attention", "qwen_sparse_attention"], "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 8, "indexer_budget": 4, "indexer_compress_ratio": 2,
    },
    "RecurrentGemmaForCausalLM": {"num_hidden_layers": 3},
    "ReformerForMaskedLM": _REFORMER | {"is_decoder": False},
    "ReformerModelWithLMHead": _REFORMER | {"is_decoder": True},
    "SwitchTransformersForConditionalGeneration": _T5 | {"use_cache": False},  # its forward has no switch for it
    "T5ForConditionalGeneration": _T5,
    "VisionEncoderDecoderModel": {"encoder": _VIT, "decoder": _DECODER} | _STARTS,
    "VoxtralForConditionalGeneration": {"audio_token_id": 14},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "XmodForMaskedLM": {"default_language": "en_XX"},
    "Zamba2ForCausalLM": _LINEAR_AND_SHARED,
    "ZambaForCausalLM": _LINEAR_AND_SHARED,
}  # fmt: skip
