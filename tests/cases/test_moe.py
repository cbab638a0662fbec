"""Mixtures of experts: routing that is random, counted, or both."""

import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from tests import models
from tests.cases.rewriting import SMALL, assert_at_work, assert_trains_alike, batch, loss_on, twin


def test_jitter_that_is_multiplied_into_the_input_in_place(grain):
    """Mixtral spoils the hidden states with fresh noise before it routes them (NVIDIA-NeMo/Automodel#2635)."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.25}
    plain = MixtralForCausalLM(
        MixtralConfig(**SMALL, **experts, vocab_size=models.VOCAB, num_attention_heads=4),
    ).train()
    model = twin(plain, grain)
    assert_trains_alike(plain, model, loss_on(batch(17)))
    assert_at_work(model)


class CountingRouter(nn.Module):
    """Weigh tokens by their best expert, and count in a buffer how often each was that."""

    def __init__(self, width, num_experts):
        super().__init__()
        self.score = nn.Linear(width, num_experts)
        self.register_buffer("load", torch.zeros(num_experts, dtype=torch.long))

    def forward(self, x):
        weight, chosen = self.score(x).softmax(-1).max(-1, keepdim=True)
        if self.training:
            self.load += torch.bincount(chosen.flatten(), minlength=len(self.load))
        return weight


class RoutedBlock(nn.Module):
    def __init__(self, width=8, num_experts=4):
        super().__init__()
        self.router = CountingRouter(width, num_experts)
        self.expert = nn.Linear(width, width)

    def forward(self, x):
        return x + self.router(x) * self.expert(x).tanh()


def test_expert_counters_advance_once_a_step(grain):
    """A usage counter that steers the router's bias went twice as fast (PrimeIntellect-ai/prime-rl#2953)."""
    plain = nn.Sequential(*(RoutedBlock() for _ in range(3)))
    model, x, steps = twin(plain, grain), torch.randn(2, 5, 8), 3
    assert_trains_alike(plain, model, lambda m: m(x).square().mean(), steps)
    for block, other in zip(plain, model, strict=True):
        assert torch.equal(block.router.load, other.router.load)
        assert other.router.load.sum() == steps * 2 * 5
    assert_at_work(model)
