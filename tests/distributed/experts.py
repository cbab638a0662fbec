"""Experts on several processes: tokens go where their expert is, and come back. Spawned processes import this module."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.nn.functional import silu

import memopt
from tests.runtime.layers import Model
from tests.runtime.offloads import PARADIGM, assert_same_step
from tests.runtime.test_parts_composition import WIDTH, hidden

NUM_EXPERTS, INNER = 4, 24


class Experts(nn.Module):
    """Some of the experts, each with its weights in one parameter, and their activation as a method."""

    def __init__(self, num_experts):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, WIDTH, 2 * INNER) / 8)
        self.down_proj = nn.Parameter(torch.randn(num_experts, INNER, WIDTH) / 8)

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    def forward(self, tokens):
        """Take and return tokens by expert: (experts, tokens, width)."""
        return torch.bmm(self._apply_gate(torch.bmm(tokens, self.gate_up_proj)), self.down_proj)


class Moe(nn.Module):
    """As many tokens for each expert, weighted by a router; experts on other processes are asked through the group."""

    world = 1

    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, NUM_EXPERTS)
        self.experts = Experts(NUM_EXPERTS // self.world)

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        tokens = x.flatten(0, 1).unflatten(0, (NUM_EXPERTS, -1))
        out = self.combine(self.experts(self.dispatch(tokens))).flatten(0, 1).view_as(x)
        return out * weights.amax(-1, keepdim=True)

    def dispatch(self, tokens):
        return tokens

    def combine(self, tokens):
        return tokens


class ParallelMoe(Moe):
    world = 2

    def dispatch(self, tokens):
        sent = all_to_all_single(torch.empty_like(tokens), tokens.contiguous())
        return sent.unflatten(0, (self.world, -1)).transpose(0, 1).flatten(1, 2)

    def combine(self, tokens):
        back = tokens.unflatten(1, (self.world, -1)).transpose(0, 1).flatten(0, 1).contiguous()
        return all_to_all_single(torch.empty_like(back), back)


def build(mlp):
    model = Model(WIDTH, mlp)
    torch.manual_seed(dist.get_rank())
    for layer in model.layers:
        for parameter in layer.mlp.experts.parameters():
            nn.init.normal_(parameter, std=0.1)
    return model


def offloaded(rank, world, order):
    """Several steps of a model whose plan was made of a twin with all experts, beside one that is not rewritten."""
    assert world == ParallelMoe.world
    plan = memopt.plan(memopt.analyze(Model(WIDTH, Moe), hidden()), **PARADIGM)
    plain, model = build(ParallelMoe), build(ParallelMoe)
    for module in model.modules():  # the plan knows the class by its twin's name
        if type(module) is ParallelMoe:
            module.__class__ = type("Moe", (ParallelMoe,), {})
    handle = memopt.apply(model, plan)
    for seed in range(4):
        assert_same_step(plain, model, hidden(seed + 10 * rank))
    stats = handle.stats()
    assert stats.copied_out_bytes == stats.copied_in_bytes > 0
    assert stats.checkpointed_calls == stats.replayed_calls == 4 * 9
