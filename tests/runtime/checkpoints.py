"""Checkpointed models, made through the public API, and what their training must not differ in."""

import copy
import functools

import torch
from torch import nn

import memopt
from memopt.passes import ActivationCheckpoint
from tests import zoo

MODES = ("full", "selective")
"""Those that a configuration can name."""


class Stack(nn.Module):
    """Layers in a row, where a plan looks for them; returns what the last one does."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, *more):
        for layer in self.layers:
            x = layer(x, *more)
        return x


class Two(nn.Module):
    """Two products, and between them a factor that may depend on what subclasses carry."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.set_up()

    def set_up(self):
        pass

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)) * self.factor(x))

    def factor(self, x):
        return 1


def plan_of(graph, mode):
    if mode in MODES:
        return memopt.plan(graph, activation_checkpoint=mode)
    return memopt.plan(graph, passes=[ActivationCheckpoint(mode=mode)])


def checkpointed(plain, mode, *args, **kwargs):
    """Return a checkpointed copy of a model, planned for these inputs, and the handle of its rewriting."""
    model = copy.deepcopy(plain)
    return model, memopt.apply(model, plan_of(memopt.analyze(plain, kwargs or args), mode))


@functools.cache
def graph_of(name, labelled):
    inputs = zoo.batch(name, use_cache=False)
    return memopt.analyze(zoo.ZOO[name](), {key: value for key, value in inputs.items() if labelled or key != "labels"})


def checkpointed_zoo(name, mode, *, labelled=True):
    """Return a model of the zoo, a checkpointed one, and the handle; the graph of a model is made once."""
    model = zoo.ZOO[name]()
    return zoo.ZOO[name](), model, memopt.apply(model, plan_of(graph_of(name, labelled), mode))


def stacked(mode, x, *layers):
    """Return a stack of layers, a checkpointed copy of it, and the handle."""
    plain = Stack(*layers)
    return plain, *checkpointed(plain, mode, x)


def gradients(model, *args, seed=0, loss_of=lambda out: out.square().sum()):
    """Return the loss of one step and all gradients, of the first argument too, and the buffers; one seed for all."""
    model.zero_grad()
    torch.manual_seed(seed)
    x = args[0].detach().clone().requires_grad_(args[0].is_floating_point())
    loss = loss_of(model(x, *args[1:]))
    loss.backward()
    return collected(model) | {"loss": loss.detach(), "input": x.grad}


def collected(model):
    """Return copies of the gradients and buffers of a model."""
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return grads | {name: b.clone() for name, b in model.named_buffers()}


def calls(handle):
    """Return how many calls of regions dropped what they save, and how many were replayed."""
    stats = handle.stats()
    return stats.checkpointed_calls, stats.replayed_calls
