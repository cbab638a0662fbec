"""Fields by class, as those of `fields`, of models of images and of sound."""

from tests.architectures.fields import FIELDS

_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_TEXT_SECTIONS = {"text_config": {"rope_parameters": _SECTIONS}}
_WIDE_WINDOW = {"vision_config": {"window_size": 16}}
_LISTED = {"vision_config": {"image_size": [16, 16], "patch_size": [8, 8]}}
_TILED = {"image_grid_pinpoints": [[16, 16]], "vision_feature_layer": -1}
_QUERIES = {"num_query_tokens": 4, "image_token_index": 10, "text_config": {"word_embed_proj_dim": 32}}
_CODES = {"<image>": 10, **{f"IMGIMG{letter}Z": 20 + n for n, letter in enumerate("ABCDEFGH")}}
_LINEAR_AND_FULL = {"text_config": {"layer_types": ["linear_attention", "full_attention"]}}
_DEEPSTACK = {"vision_config": {"deepstack_visual_indexes": [0, 1]}}
_CODER = {"hidden_size": 8, "num_filters": 4, "downsampling_ratios": [2, 4], "depths": [1, 1, 1]}
_SOFT_PATCHES = {
    "vision_config": {
        "model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pooling_kernel_size": 2, "patch_size": 8,
        "position_embedding_size": 64,
    },
}  # fmt: skip

VISION_FIELDS: dict[str, dict] = {
    "AriaForConditionalGeneration": {"projector_patch_to_query_dict": {4: 4}},
    "AyaVisionForConditionalGeneration": {"vision_config": {"image_size": 32}},
    "Blip2ForConditionalGeneration": _QUERIES,
    "ChameleonForConditionalGeneration": {"vocabulary_map": _CODES, "vq_config": {"num_embeddings": 8, "embed_dim": 32}},
    "CohereCompassForConditionalGeneration": {"text_config": {"rope_parameters": {"full_attention": _SECTIONS}}},
    "Cosmos3EdgeForConditionalGeneration": _TEXT_SECTIONS,
    "Cosmos3OmniForConditionalGeneration": _TEXT_SECTIONS | _DEEPSTACK,
    "DeepseekOcr2ForConditionalGeneration": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
        "vision_config": {"sam_config": {"downsample_channels": [16, 32]}},
    },
    "DeepseekVLHybridForConditionalGeneration": {"high_res_vision_config": {"global_attn_indexes": [0, 1]}},
    "DiffusionGemmaForBlockDiffusion": {
        "text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}, **_SOFT_PATCHES,
    },
    "Emu3ForConditionalGeneration": {
        "vocabulary_map": {
            "<image>": 10, "<|extra_200|>": 30, **{f"<|visual token {n:06}|>": 20 + n for n in range(8)},
        },
        "vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "codebook_size": 8, "attn_resolutions": [8]},
    },
    "Ernie4_5_VLMoeForConditionalGeneration": _TEXT_SECTIONS,
    "Exaone4_5_ForConditionalGeneration": _WIDE_WINDOW,
    "FastVlmForConditionalGeneration": {
        "vision_config": {
            "model_type": "timm_wrapper", "architecture": "fastvit_mci3", "do_pooling": True, "hidden_size": 256,
            "model_args": {"layers": [1, 1, 1, 1, 1], "embed_dims": [8, 16, 32, 64, 128]},
        },
    },
    "Florence2ForConditionalGeneration": {
        "vision_config": {
            "embed_dim": [16, 16, 16, 16], "num_heads": [2, 2, 2, 2], "num_groups": [2, 2, 2, 2], "depths": [1, 1, 1, 1],
        },
    },
    "Gemma3nForConditionalGeneration": {
        "text_config": FIELDS["Gemma3nForCausalLM"], "vision_soft_tokens_per_image": 4,
        "vision_config": {
            "hidden_size": 2048, "model_args": {"channel_multiplier": 1 / 16, "msfa_output_resolution": 2},
        },
    },
    "Gemma4ForConditionalGeneration": _SOFT_PATCHES,
    "Gemma4UnifiedForConditionalGeneration": {
        "vision_config": {
            "model_type": "gemma4_unified_vision", "patch_size": 8, "pooling_kernel_size": 1, "mm_embed_dim": 32,
            "mm_posemb_size": 64, "output_proj_dims": 32,
        },
    },
    "Glm46VForConditionalGeneration": _TEXT_SECTIONS,
    "Glm4vForConditionalGeneration": _TEXT_SECTIONS,
    "Glm4vMoeForConditionalGeneration": {
        "text_config": {"rope_parameters": _SECTIONS | {"partial_rotary_factor": 1.0}},
    },
    "Glm5NextForConditionalGeneration": {"text_config": {"index_kpool": 2}},
    "GlmOcrForConditionalGeneration": _TEXT_SECTIONS,
    "Granite4VisionForConditionalGeneration": _TILED | {
        "text_config": {"model_type": "granite"}, "deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2",
        "vision_feature_select_strategy": "default", "qformer_config": {"encoder_hidden_size": 64},
        "vision_config": {"hidden_size": 64},
    },
    "GraniteSpeechForConditionalGeneration": {"window_size": 10},
    "GraniteSpeechPlusForConditionalGeneration": {"window_size": 10},
    "HunYuanVLForConditionalGeneration": {
        "text_config": {"head_dim": 8, "rope_parameters": _SECTIONS | {"mrope_section": [1, 1, 1, 1]}},
    },
    "IdeficsForVisionText2Text": {"freeze_text_layers": False, "freeze_vision_layers": False},
    "InklingForConditionalGeneration": {"vision_config": {"n_layers": 5}},  # as many as there are scales
    "InstructBlipForConditionalGeneration": _QUERIES,
    "InstructBlipVideoForConditionalGeneration": _QUERIES | {"video_token_index": 10},
    "InternVLForConditionalGeneration": _LISTED,
    "JanusForConditionalGeneration": {"vq_config": {"num_embeddings": 8}},  # else the largest table of all
    "Kimi_K25ForConditionalGeneration": {"projection_hidden_size": 32},
    "Kosmos2ForConditionalGeneration": {"latent_query_num": 4},
    "Kosmos2_5ForConditionalGeneration": {"latent_query_num": 4, "vision_config": {"patch_embed_hidden_size": 48}},
    "Lfm2VlForConditionalGeneration": {"text_config": {"layer_types": ["conv", "full_attention"]}},
    "Llama4ForConditionalGeneration": {
        "vision_config": {
            "intermediate_size": 128, "projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32,
        },
    },
    "LlavaForConditionalGeneration": {"vision_feature_layer": -1},
    "LlavaNextForConditionalGeneration": _TILED,
    "LlavaNextVideoForConditionalGeneration": _TILED,
    "LlavaOnevisionForConditionalGeneration": _TILED,
    "MiniCPMV4_6ForConditionalGeneration": {"image_token_id": 10},
    "Mistral4ForCausalLM": {
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 64,
        },
    },
    "MllamaForConditionalGeneration": {
        "text_config": {"cross_attention_layers": [1]},
        "vision_config": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 96},
    },
    "MuseGlimmerForConditionalGeneration": {"out_hidden_size": 128, "projector_hidden_size": 32},
    "PPFormulaNetForConditionalGeneration": {
        "vision_config": {
            "post_conv_in_channels": 256, "post_conv_mid_channels": 32, "post_conv_out_channels": 32,
            "decoder_hidden_size": 32,
        },
    },
    "PaddleOCRVLForConditionalGeneration": _TEXT_SECTIONS,
    "PerceptionLMForConditionalGeneration": {
        "vision_config": {
            "model_type": "timm_wrapper", "architecture": "vit_pe_core_large_patch14_336", "do_pooling": False,
            "model_args": {
                "embed_dim": 32, "depth": 2, "num_heads": 4, "img_size": [28, 28], "ref_feat_shape": [2, 2],
                "global_pool": "", "use_post_transformer_norm": False, "init_values": 0.1,
            },
        },
    },
    "Pix2StructForConditionalGeneration": {
        "text_config": {"decoder_start_token_id": 0}, "vision_config": {"patch_embed_hidden_size": 48, "seq_len": 64},
    },
    "QianfanOCRForConditionalGeneration": _LISTED,
    "Qwen2VLForConditionalGeneration": _TEXT_SECTIONS | {"vision_config": {"embed_dim": 32, "hidden_size": 32}},
    "Qwen2_5OmniThinkerForConditionalGeneration": _WIDE_WINDOW | _TEXT_SECTIONS,
    "Qwen2_5_VLForConditionalGeneration": _WIDE_WINDOW | _TEXT_SECTIONS,
    "Qwen3OmniMoeThinkerForConditionalGeneration": _DEEPSTACK | _TEXT_SECTIONS,
    "Qwen3VLForConditionalGeneration": _DEEPSTACK | _TEXT_SECTIONS,
    "Qwen3VLMoeForConditionalGeneration": _DEEPSTACK | _TEXT_SECTIONS,
    "Qwen3ASRForConditionalGeneration": {"audio_config": {"output_dim": 32}},
    "Qwen3_5ForConditionalGeneration": _LINEAR_AND_FULL,
    "Qwen3_5MoeForConditionalGeneration": _LINEAR_AND_FULL,
    "Qwen4ExpForConditionalGeneration": {
        "text_config": {
            "layer_types": ["linear_attention", "qwen_sparse_attention"], "indexer_n_heads": 2, "indexer_kv_heads": 1,
            "indexer_head_dim": 8, "indexer_budget": 4, "indexer_compress_ratio": 2,
        },
    },
    "Step3p7ForConditionalGeneration": {"text_config": {"sliding_window": 4}},
    "UdopForConditionalGeneration": {"decoder_start_token_id": 0},
    "VibeVoiceAsrForConditionalGeneration": {
        "acoustic_tokenizer_encoder_config": _CODER, "semantic_tokenizer_encoder_config": _CODER,
    },
    "VideoLlavaForConditionalGeneration": {"vision_feature_layer": -1},
    "VipLlavaForConditionalGeneration": {"vision_feature_layers": [-2, -1]},
}  # fmt: skip
