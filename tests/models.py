"""Tiny models from configs, with random seeded weights, and the batches they are trained with."""

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    Qwen3MoeConfig,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

VOCAB = 512
COMMON = {"vocab_size": VOCAB, "hidden_size": 256, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512}
MOE = {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}


def qwen3_moe(seed=0, **options):
    return _build(Qwen3MoeConfig(**(COMMON | HEADS | MOE | options)), seed)


def llama(seed=0, **options):
    return _build(LlamaConfig(**(COMMON | HEADS | {"num_key_value_heads": 4} | options)), seed)


def gpt2(seed=0, **options):
    return _build(GPT2Config(**({"vocab_size": VOCAB, "n_embd": 256, "n_layer": 3, "n_head": 4} | options)), seed)


def opt(seed=0, **options):
    small = {
        "hidden_size": 256,
        "ffn_dim": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 256,
    }
    return _build(OPTConfig(**({"vocab_size": VOCAB} | small | options)), seed)


def bart(seed=0, **options):
    torch.manual_seed(seed)
    return BartForConditionalGeneration(BartConfig(**(_encoder_decoder() | options))).train()


def whisper(seed=0, **options):
    torch.manual_seed(seed)
    small = {"num_mel_bins": 8, "max_source_positions": 64, "decoder_start_token_id": 1, "pad_token_id": 0}
    return WhisperForConditionalGeneration(WhisperConfig(**(_encoder_decoder() | small | options))).train()


def _encoder_decoder():
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return {"vocab_size": VOCAB, "d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128} | layers


def _build(config, seed, attn_implementation=None):
    torch.manual_seed(seed)
    attn_implementation = getattr(config, "_attn_implementation", None) or attn_implementation
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation).train()


def batch(batch_size=2, seq_length=512, seed=1, **more):
    """Return a batch whose attention saves reach the 1 MiB of the unchanged policy."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (batch_size, seq_length), generator=generator)
    return {"input_ids": ids, "labels": ids, "use_cache": False, **more}


class Attention(nn.Module):
    """Plain attention, for models that transformers does not have."""

    def __init__(self, width=256, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention, width=256):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.self_attn = attention
        self.mlp = nn.Linear(width, width)

    def forward(self, x):
        x = x + self.self_attn(self.norm(x))
        return x + self.mlp(x).relu()


class SharedAttention(nn.Module):
    """Three blocks, the first and the last with one attention between them."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        one, other = Attention(), Attention()
        self.blocks = nn.Sequential(Block(one), Block(other), Block(one))

    def forward(self, x):
        return self.blocks(x).square().mean()


def hidden(batch_size=2, seq_length=512, width=256, seed=1):
    return torch.randn(batch_size, seq_length, width, generator=torch.Generator().manual_seed(seed))
