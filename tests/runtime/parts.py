"""Small layers for tests of regions: what their modules save, and what they do with it later, a test says."""

import torch
from torch import nn

WIDTH = 32


def words(length, batch_size=2, seed=0):
    """Return a batch with labels for a text model of the zoo."""
    ids = torch.randint(20, 128, (batch_size, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def hidden(seed=0, length=16):
    return torch.randn(4, length, WIDTH, generator=torch.Generator().manual_seed(seed))


class Product(torch.autograd.Function):
    """Multiply two tensors, saving both and no product."""

    @staticmethod
    def forward(ctx, one, other):
        ctx.save_for_backward(one, other)
        return one * other

    @staticmethod
    def backward(ctx, grad):
        one, other = ctx.saved_tensors
        return grad * other, (grad * one if ctx.needs_input_grad[1] else None)


class Stack(nn.Module):
    """Layers one after another, each called with the hidden state and whatever else is given."""

    def __init__(self, make, num_layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(make() for _ in range(num_layers))

    def forward(self, x, *more):
        for layer in self.layers:
            x = layer(x, *more)
        return x


class Attention(nn.Module):
    """Queries, keys, values and a gate are views of one fused projection; the gate is used by the layer, later."""

    def __init__(self):
        super().__init__()
        self.qkv_proj = nn.Linear(WIDTH, 4 * WIDTH)
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v, gate = self.qkv_proj(x).chunk(4, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(*(t.unsqueeze(1) for t in (q, k, v)), is_causal=True)
        return self.o_proj(mixed.squeeze(1)), gate


class GatedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.self_attn = Attention()

    def forward(self, x):
        mixed, gate = self.self_attn(self.input_layernorm(x))
        return x + mixed * gate.sigmoid()
