"""Models for ``package.module:factory``."""

import torch
from torch import nn


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=128, n_positions=128))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=256,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=64,
        )
    )


def dropout_noise():
    """Return a model that is never the same twice: it draws from a generator that no seed reaches."""
    model = llama()
    generator = torch.Generator()
    generator.seed()
    model.lm_head.register_forward_pre_hook(
        lambda module, args: (args[0] + torch.randn(args[0].shape, generator=generator),)
    )
    return model


def no_model():
    return "a string"


class NoTokens(nn.Module):
    def forward(self, x):
        return x


def no_tokens():
    model = NoTokens()
    model.layer = nn.Linear(2, 2)
    return model
