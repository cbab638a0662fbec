"""Fields by class, as those of `fields`, of classes that came after transformers 5.17.0."""

_TEXT_WIDTH = {"vision_config": {"text_hidden_size": 32, "projection_hidden_dim": 32, "posemb_grid_size": 4}}
_ROW = {"insert_layer_id": 0, "image_token_id": 10, "vision_config": {"insert_layer_id": 0}}

NEWER_FIELDS: dict[str, dict] = {
    "Apertus1p5ForConditionalGeneration": {
        "audio_config": {"codebook_dim": 32, "codebook_size": 8, "num_filters": 4, "upsampling_ratios": [4, 4]},
        "audio_token_offset": 48, "image_token_offset": 40,
        "vision_config": {
            "codebook_size": 8, "embed_dim": 32, "latent_channels": 32, "base_channels": 32,
            "channel_multiplier": [1, 1], "num_res_blocks": 1, "attn_resolutions": [8], "resolution": 16,
        },
    },
    "BailingHybridForCausalLM": {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    "Dots3NoteForConditionalGeneration": {
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
        "vision_config": {
            "pyramid_num_routed": [-1, 4], "adapter_in_dim": 32, "adapter_out_dim": 32, "num_experts_per_tok": 2,
        },
    },
    "GraniteDoclingForConditionalGeneration": {
        "vision_config": {"scale_factor": 2, "deepstack_visual_indexes": [0, 1]},
    },
    "HYV4VLForConditionalGeneration": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    },
    "Inkling2ForConditionalGeneration": _TEXT_WIDTH,
    "Inkling2LoopForConditionalGeneration": _TEXT_WIDTH,
    "Lfm3ForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Lfm3VlForConditionalGeneration": {"text_config": {"layer_types": ["conv", "full_attention"]}},
    "MiniCPMOcrForConditionalGeneration": _ROW,
    "MiniCPMV4_7ForConditionalGeneration": _ROW,
    "HyperCLOVAXVisionV2ForConditionalGeneration": {"vision_config": {"window_size": 16}},
    "Molmo2ForConditionalGeneration": {
        "adapter_config": {"vision_feature_layer": [-2, -1], "text_hidden_size": 32},
        "image_patch_id": 10, "text_config": {"additional_vocab_size": 8}, "vision_config": {"image_size": [16, 16]},
    },
    "MuseSparkForConditionalGeneration": {
        "audio_config": {
            "patch_sizes": [4, 2], "hidden_sizes": [16, 32], "depths": [1, 1], "num_hidden_layers": 2,
        },
        "out_hidden_size": 128, "projector_hidden_size": 32, "text_config": {"moe_hidden_size": 32},
    },
    "Nemotron3_5TranscribeForConditionalGeneration": {
        "audio_config": {"diarization_config": {"head_config": {"audio_hidden_size": 32}}},
        "word_timestamp_config": {"blank_token_id": 127},
    },
    "NemotronH_Omni_Reasoning_V3": {
        "projector_hidden_size": 32, "vision_config": {"video_temporal_patch_size": 2}, "vision_hidden_size": 32,
        "image_token_id": 10,
    },
    "OmniASRForConditionalGeneration": {
        "audio_config": {
            "conv_dim": [16, 16], "conv_kernel": [4, 2], "conv_stride": [4, 2], "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0,
        },
    },
    "UltraVBertForMaskedLM": {"pixel_shuffle_factor": 2},
    "UnlimitedOcrForConditionalGeneration": {"vision_config": {"sam_config": {"downsample_channels": [16, 32]}}},
}  # fmt: skip
