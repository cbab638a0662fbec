"""Tiny models of many architectures, with seeded weights, and a batch with labels for each.

A step takes well under a second on a CPU, in float32, and gives the same bits from the same seed: whatever is done to
a model, if it claims to change nothing, must leave the loss and every gradient of `train_step` as they were.
"""

from functools import partial

import torch
import transformers

VOCAB = 128
BATCH_SIZE, SEQ_LENGTH = 2, 12
IMAGE, VIDEO, VISION_START, VISION_END, SOUND, FIRST_WORD = 10, 11, 12, 13, 14, 20

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4} | SPECIAL
DENSE = TEXT | {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
BORROWED_KEYS = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 4, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
    "num_key_value_heads": 4, "first_k_dense_replace": 1,
}  # fmt: skip
MAMBA = {"mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
CODER = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "decoder_start_token_id": 1,
} | SPECIAL  # fmt: skip
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "image_size": 16, "patch_size": 8,
}  # fmt: skip
QWEN_VISION = {
    "depth": 2, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4,
    "window_size": 8, "fullatt_block_indexes": [1],
}  # fmt: skip


def tiny(class_name, *shared, **own):
    """Return a builder of a class of transformers; the builder takes more options of its configuration."""
    options = {key: value for some in (*shared, own) for key, value in some.items()}
    return partial(_build, class_name, **options)


def _build(class_name, **options):
    cls = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**options)).train()
    with torch.no_grad():
        for p in model.parameters():
            if not p.any():  # a bias; or a scale, behind which nothing would be trained in the first step
                p.normal_(std=0.02)
    return model


ZOO = {
    # decoders
    "llama": tiny("LlamaForCausalLM", DENSE),
    "llama_dynamic_rope": tiny(  # replaces a buffer, its sequences being longer than what it knows
        "LlamaForCausalLM", DENSE, max_position_embeddings=8,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    ),
    "mistral": tiny("MistralForCausalLM", DENSE, sliding_window=4),
    "qwen2": tiny("Qwen2ForCausalLM", DENSE),
    "qwen3": tiny("Qwen3ForCausalLM", DENSE),
    "phi3": tiny("Phi3ForCausalLM", DENSE, resid_pdrop=0.1),
    "cohere2": tiny("Cohere2ForCausalLM", DENSE, SLIDING),
    "olmo2": tiny("Olmo2ForCausalLM", DENSE),
    "gemma2": tiny("Gemma2ForCausalLM", DENSE, SLIDING),
    "gemma3": tiny("Gemma3ForCausalLM", DENSE, SLIDING),
    "gpt2": tiny("GPT2LMHeadModel", SPECIAL, vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4),
    "gpt_neox": tiny("GPTNeoXForCausalLM", TEXT, intermediate_size=48, hidden_dropout=0.1),
    "opt": tiny("OPTForCausalLM", TEXT, ffn_dim=48, word_embed_proj_dim=16),
    "bloom": tiny("BloomForCausalLM", TEXT, hidden_dropout=0.1),
    # decoders whose last layers borrow keys and values from earlier ones
    "gemma3n": tiny(
        "Gemma3nForCausalLM", DENSE, BORROWED_KEYS, laurel_rank=4, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
    ),
    "gemma4": tiny("Gemma4ForCausalLM", DENSE, BORROWED_KEYS, global_head_dim=8),
    # mixtures of experts
    "mixtral": tiny("MixtralForCausalLM", DENSE, LOCAL_EXPERTS, router_jitter_noise=0.1),
    "qwen3_moe": tiny("Qwen3MoeForCausalLM", DENSE, EXPERTS, norm_topk_prob=True),
    "qwen3_moe_aux_loss": tiny("Qwen3MoeForCausalLM", DENSE, EXPERTS, output_router_logits=True),
    "granite_moe": tiny("GraniteMoeForCausalLM", DENSE, LOCAL_EXPERTS),
    "qwen3_next": tiny("Qwen3NextForCausalLM", DENSE, LINEAR, EXPERTS, shared_expert_intermediate_size=16),
    "qwen3_5_moe": tiny("Qwen3_5MoeForCausalLM", DENSE, LINEAR, EXPERTS, shared_expert_intermediate_size=16),
    "deepseek_v3": tiny("DeepseekV3ForCausalLM", DENSE, LATENT, ROUTED_EXPERTS),
    "glm4_moe": tiny("Glm4MoeForCausalLM", DENSE, ROUTED_EXPERTS),
    "llama4": tiny(
        "Llama4ForCausalLM", DENSE, LOCAL_EXPERTS, intermediate_size_mlp=48, interleave_moe_layer_step=2,
        attention_chunk_size=8,
    ),
    "gpt_oss": tiny("GptOssForCausalLM", DENSE, LOCAL_EXPERTS, SLIDING, experts_implementation="grouped_mm"),
    # state spaces, alone and with attention
    "mamba": tiny("MambaForCausalLM", TEXT, state_size=4),
    "mamba2": tiny("Mamba2ForCausalLM", TEXT, state_size=4, num_heads=4, head_dim=16, n_groups=1, chunk_size=8),
    "jamba": tiny(
        "JambaForCausalLM", DENSE, EXPERTS, mamba_d_state=4, attn_layer_period=2, attn_layer_offset=1,
        expert_layer_period=2, expert_layer_offset=1, use_mamba_kernels=False,
    ),
    "falcon_h1": tiny("FalconH1ForCausalLM", DENSE, MAMBA, mamba_d_ssm=64),
    "nemotron_h": tiny(
        "NemotronHForCausalLM", DENSE, EXPERTS, num_hidden_layers=4, n_routed_experts=4, ssm_state_size=4,
        layers_block_type=["mamba", "attention", "moe", "mlp"], mamba_num_heads=4, mamba_head_dim=16, n_groups=1,
        chunk_size=8, moe_shared_expert_intermediate_size=16,
    ),
    "zamba2": tiny(  # one set of weights for the attention of all layers
        "Zamba2ForCausalLM", TEXT, num_hidden_layers=4, intermediate_size=48, num_key_value_heads=4,
        attention_head_dim=16, layers_block_type=["mamba", "hybrid"] * 2, num_mem_blocks=1, adapter_rank=4,
        n_mamba_heads=4, mamba_headdim=16, mamba_d_state=4, mamba_ngroups=1, chunk_size=8,
    ),
    # encoders, and encoders with decoders
    "bert": tiny("BertForMaskedLM", TEXT, intermediate_size=48),
    "modernbert": tiny(
        "ModernBertForMaskedLM", TEXT, intermediate_size=48, local_attention=4, mlp_dropout=0.1, cls_token_id=3,
        sep_token_id=4,
    ),
    "big_bird": tiny(  # shuffles blocks by numpy's random numbers, layer by layer
        "BigBirdForMaskedLM", TEXT, intermediate_size=48, attention_type="block_sparse", block_size=1,
        num_random_blocks=1,
    ),
    "wav2vec2_conformer": tiny(  # counts batches in its layers
        "Wav2Vec2ConformerForCTC", TEXT, intermediate_size=48, conv_dim=[16, 16], conv_kernel=[4, 2], conv_stride=[4, 2],
        num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_length=2,
        mask_time_prob=0.3, layerdrop=0.0,
    ),
    "t5": tiny(
        "T5ForConditionalGeneration", SPECIAL, vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2,
        num_heads=4, decoder_start_token_id=0,
    ),
    "bart": tiny("BartForConditionalGeneration", CODER),
    "whisper": tiny(
        "WhisperForConditionalGeneration", CODER, num_mel_bins=8, max_source_positions=12, dropout=0.1,
        apply_spec_augment=True, mask_time_prob=0.3, mask_time_length=2, mask_feature_prob=0.3, mask_feature_length=2,
    ),
    # an image tower and a text tower
    "llava": tiny(
        "LlavaForConditionalGeneration", text_config=DENSE | {"model_type": "llama"}, vision_config=CLIP,
        image_token_id=IMAGE,
    ),
    "qwen2_5_vl": tiny(
        "Qwen2_5_VLForConditionalGeneration", vision_config=QWEN_VISION, image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=VISION_START, vision_end_token_id=VISION_END,
        text_config=DENSE | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}},
    ),
}  # fmt: skip
"""Builders by name. GPT-2, OPT, BERT, T5 and BART have dropout by default, some others by their options here."""


def batch(name, **more):
    """Return the inputs of a model of the zoo, with labels; most decoders fill a cache unless `use_cache=False`."""
    return BATCHES.get(name, words)() | more


def words():
    ids = _ids()
    return {"input_ids": ids, "labels": ids}


def sound():
    features = torch.randn(BATCH_SIZE, 8, 2 * SEQ_LENGTH, generator=_generator())
    return {"input_features": features, "labels": _ids()}


def wave():
    waves = torch.randn(BATCH_SIZE, 8 * (2 * SEQ_LENGTH + 1), generator=_generator())
    return {"input_values": waves, "labels": _ids()}


def image():
    ids = _ids()
    ids[:, 1:5] = IMAGE
    pixels = torch.randn(BATCH_SIZE, 3, 16, 16, generator=_generator())
    return {"input_ids": ids, "pixel_values": pixels, "labels": ids}


def image_of_patches():
    ids = _ids()
    ids[:, 1], ids[:, 2:6], ids[:, 6] = VISION_START, IMAGE, VISION_END
    patches = torch.randn(BATCH_SIZE * 16, 3 * 2 * 4 * 4, generator=_generator())
    grid = torch.tensor([[1, 4, 4]] * BATCH_SIZE)
    kinds = (ids == IMAGE).long()
    return {
        "input_ids": ids,
        "pixel_values": patches,
        "image_grid_thw": grid,
        "mm_token_type_ids": kinds,
        "labels": ids,
    }


def _ids():
    return torch.randint(FIRST_WORD, VOCAB, (BATCH_SIZE, SEQ_LENGTH), generator=_generator())


def _generator():
    return torch.Generator().manual_seed(1)


BATCHES = {"wav2vec2_conformer": wave, "whisper": sound, "llava": image, "qwen2_5_vl": image_of_patches}
"""What those models are trained with that want more than words."""


def train_step(model, inputs, seed=0):
    """Return the loss, every gradient and every buffer after one step; all random numbers come from the seed."""
    model.zero_grad()
    transformers.set_seed(seed)  # of Python and numpy too: Whisper masks its input by numpy's
    loss = model(**inputs).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach()} | gradients | {name: b.clone() for name, b in model.named_buffers()}


def differing(one, other):
    """Return what two steps differ in: the names whose tensors are not equal bit for bit, or of which only one is there."""
    assert one.keys() == other.keys()
    return [key for key, tensor in one.items() if not _same(tensor, other[key])]


def _same(one, other):
    return one is other is None or (one is not None and other is not None and torch.equal(one, other))
