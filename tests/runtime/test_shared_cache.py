"""A cache that one tower fills and another reads: it is no byproduct, and is left to layers that are checkpointed."""

import logging

import pytest
import torch
from torch import nn

import memopt
from tests import zoo


class Cache:
    """Keys by layer, with the methods of a cache of transformers."""

    def __init__(self):
        self.keys = {}

    def get_seq_length(self, layer=0):
        return self.keys[layer].shape[1] if layer in self.keys else 0

    def update(self, keys, layer):
        self.keys[layer] = keys


class Writer(nn.Module):
    def __init__(self, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def mlp(self, hidden):
        return self.down(self.up(hidden).sigmoid())

    def forward(self, hidden, past_key_values=None):
        hidden = hidden + self.mlp(hidden)
        if past_key_values is not None:
            past_key_values.update(hidden, self.layer_idx)
        return hidden


class Reader(Writer):
    _can_checkpoint_with_cache = True

    def forward(self, hidden, past_key_values=None):
        if past_key_values is not None:
            hidden = hidden + past_key_values.keys[self.layer_idx].mean(1, keepdim=True)
        return hidden + self.mlp(hidden)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(Writer(n) for n in range(2))
        self.decoder = nn.ModuleList(Reader(n) for n in range(2))

    def forward(self, x):
        cache, hidden = Cache(), x
        for layer in self.encoder:
            hidden = layer(hidden, past_key_values=cache)
        for layer in self.decoder:
            x = layer(x, past_key_values=cache)
        return x.square().mean()


def gradients(model, x):
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_that_fill_a_cache_for_others_keep_it(compiled, caplog):
    torch.manual_seed(0)
    model, x = Towers().train(), torch.randn(2, 4, 8)
    want = gradients(model, x)
    handle = memopt.apply(
        model, memopt.plan(memopt.analyze(model, x), activation_checkpoint="full", enable_compile=compiled)
    )
    assert any("encoder" in region for region in map(str, handle.plan.decisions))
    run = torch.compile(model, backend="eager") if compiled else model
    model.zero_grad()
    with caplog.at_level(logging.WARNING, "memopt"):
        loss = run(x)
        loss.backward()
    got = {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}
    assert zoo.differing(want, got) == []
    assert compiled or "or is read by other layers" in caplog.text
