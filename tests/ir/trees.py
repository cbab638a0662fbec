"""Module trees without a forward: made up by path, or transformers' own on the meta device, and their graphs."""

import torch
from torch import nn

from memopt.analyze.build import module_nodes
from memopt.ir import ModelFacts, ModuleGraph, TraceInput, layer_containers


class GradientCheckpointingLayer(nn.Module):
    """Named as the one of transformers, which is all that a graph knows of it."""


def graph_of_model(model):
    """Return a graph of a live model's modules, with no calls and no saves."""
    facts = ModelFacts(
        name="live",
        class_name=type(model).__name__,
        num_parameters=0,
        parameter_bytes=0,
        transformers_version="",
    )
    trace_input = TraceInput(
        batch_size=1, seq_length=1, dtype="", autocast="none", attn_implementation="", target_device=""
    )
    return ModuleGraph(
        model=facts, input=trace_input, modules=module_nodes(model), calls=(), saved=(), flows=(), held=frozenset()
    )


def containers(model):
    """Return role, FQN and number of layers of each container of a live model."""
    return [(c.role, c.fqn, len(c.layers)) for c in layer_containers(graph_of_model(model))]


def made(class_name, bases=(nn.Module,), **children):
    """Return a module of a made-up class; a dotted path stands for modules in modules."""
    module = type(class_name, bases, {})()
    for path, child in children.items():
        put(module, path, child)
    return module


def fake(class_name, children, bases=(nn.Module,)):
    """Return a module of a made-up class with children at dotted paths."""
    return made(class_name, bases, **children)


def put(module, path, child):
    """Register a child at a dotted path, with plain modules on the way."""
    first, _, rest = path.partition(".")
    if not rest:
        module.add_module(first, child)
        return
    if first not in module._modules:
        module.add_module(first, nn.Module())
    put(module._modules[first], rest, child)


def stack(num_layers, layer=None):
    """Return a ModuleList of that many layers, by default of an attention and an MLP."""
    return nn.ModuleList(layer() if layer else plain_layer() for _ in range(num_layers))


def plain_layer():
    """Return a layer as remote code has it."""
    return made("Layer", self_attn=nn.Linear(8, 8), mlp=nn.Linear(8, 8))


def native_layer():
    """Return a layer that transformers could checkpoint."""
    return made("DecoderLayer", (GradientCheckpointingLayer,), self_attn=nn.Linear(8, 8), mlp=nn.Linear(8, 8))


def on_meta(build):
    """Return what `build` makes, with weights that take no memory."""
    with torch.device("meta"):
        return build()
