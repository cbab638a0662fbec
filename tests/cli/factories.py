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


class NoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, labels=None):
        return self.embedding(input_ids).exp()


def no_layers():
    return NoLayers()


def frozen():
    """Return a model of which only the head and the last layer's MLP are trained."""
    model = llama()
    model.requires_grad_(False)
    model.lm_head.requires_grad_()
    model.model.layers[2].mlp.requires_grad_()
    return model
