"""What gpu_compare runs a model in: nothing, memopt's plans, and every peer as its own documentation says to use it.

Each is a context manager of (model, graph) that yields memopt's handle or None.
"""

import contextlib
import functools
import importlib.util

import torch
from gpu_attention_swap import attention_swap
from gpu_steps import nothing, paradigm_of

import memopt


@contextlib.contextmanager
def planned(model, graph, config):
    """Run as a configuration of memopt says."""
    handle = memopt.apply(model, memopt.plan(graph, config))
    try:
        yield handle
    finally:
        handle.undo()


def nothing_kept(model, graph):
    """Swap what attention saves in every layer, the last one too."""
    return attention_swap(model, memopt.plan(graph, activation_swap="attention"), margin_bytes=0)


@contextlib.contextmanager
def around(model, graph, context, modules):
    """Run the forward of some modules in a context of saved-tensor hooks, each in what `context` makes for it."""
    chosen = modules(model)
    for module in chosen:
        module.forward = _inside(context(), module.forward)
    try:
        yield None
    finally:
        for module in chosen:
            del module.forward


def _inside(context, forward):
    def run(*args, **kwargs):
        with context:
            return forward(*args, **kwargs)

    return run


def attentions(model):
    return [layer.self_attn for layer in model.model.layers]


def whole(model):
    return [model]


def save_on_cpu():
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


@contextlib.contextmanager
def trl(model, graph, modules):
    """TRL's OffloadActivations: one for each module, as one that is entered twice loses what it holds."""
    from accelerate import PartialState
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    PartialState()  # its logger asks for one
    with around(model, graph, lambda: get_act_offloading_ctx_manager(model), modules) as handle:
        yield handle


@contextlib.contextmanager
def transformers_checkpoint(model, graph, **options):
    """transformers' gradient checkpointing, not reentrant, with its own options."""
    model.gradient_checkpointing_enable({"use_reentrant": False}, **options)
    try:
        yield None
    finally:
        model.gradient_checkpointing_disable()


def modes(preset):
    """Return the modes by name, those that need most host memory last."""
    ours = {
        "memopt attention swap": functools.partial(planned, config={"activation_swap": "attention"}),
        "memopt attention swap, nothing kept": nothing_kept,
        "memopt full": functools.partial(planned, config={"activation_checkpoint": "full"}),
        "memopt selective": functools.partial(planned, config={"activation_checkpoint": "selective"}),
        "memopt paradigm": functools.partial(planned, config=paradigm_of(preset)),
    }
    peers = {
        "transformers checkpoint": transformers_checkpoint,
        "transformers checkpoint, every 2nd layer": functools.partial(transformers_checkpoint, every_n_layers=2),
        "transformers checkpoint, offloaded": functools.partial(transformers_checkpoint, offload=True),
        "save_on_cpu, self_attn": functools.partial(around, context=save_on_cpu, modules=attentions),
    }
    if importlib.util.find_spec("trl"):
        peers["TRL, self_attn"] = functools.partial(trl, modules=attentions)
        peers["TRL, whole model"] = functools.partial(trl, modules=whole)
    peers["save_on_cpu, whole model"] = functools.partial(around, context=save_on_cpu, modules=whole)
    return {"nothing": nothing} | ours | peers
