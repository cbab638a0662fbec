"""Rewrite any model coarsely or finely, and hold what it then does against the model as it was."""

import copy
import itertools

import torch
from torch import nn

import memopt
from memopt.ir import Action
from memopt.runtime import check_rewritable, preserved
from memopt.runtime.counters import summed
from memopt.runtime.region import Region, region_of
from memopt.runtime.rewrite import is_rewritten, rewrite_module
from tests import models
from tests.runtime.engines import counters_of, everything

GRAINS = ("block", "submodule", "block full", "submodule full", "block selective", "submodule selective")
"""What is rewritten, and how: swapped, or recomputed with nothing or some results kept."""
SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48,
}  # fmt: skip
"""What makes the Llama of `tests.models` tiny; its families' configurations take the same names."""


def rewritten(model, grain):
    """Swap or recompute all that the blocks of a model save, or that their children do, chained in order; in place."""
    grain, _, policy = grain.partition(" ")
    regions = _regions(model, grain)
    if policy:
        for region in regions:
            recomputed(region, policy)
        return model
    for region in regions:
        memopt.swap_wrapper(region, everything)
    manager = memopt.SwapManager()
    for current, following in itertools.pairwise(regions):
        manager.set_forward_prefetch_layer(current, following)
    return model


def swaps(grain):
    """Tell whether a grain moves tensors, and does not compute them again."""
    return grain in ("block", "submodule")


def recomputed(module, policy):
    """Recompute what one module saves, in place."""
    check_rewritable(module)
    with preserved(module):
        rewrite_module(module, Region(type(module).__name__, Action.RECOMPUTE, policy))


def twin(plain, grain):
    """Return a rewritten copy of a model."""
    return rewritten(copy.deepcopy(plain), grain)


def _regions(model, grain):
    """Return the items of every list of modules, else the children; or, one level finer, their children."""
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    regions = [item for one in lists for item in one] or list(model.children())
    if grain == "submodule":
        regions = [part for region in regions for part in (list(region.children()) or [region])]
    return [m for m in dict.fromkeys(regions) if not isinstance(m, (nn.ModuleList, nn.ModuleDict))]


def stats_of(model):
    """Return what the regions of a model copied so far."""
    return summed(counters_of(m) for m in model.modules() if is_rewritten(m))


def assert_at_work(model):
    """Saved tensors really left and really came back; a rewriting that does nothing would be right everywhere."""
    regions = [region for m in model.modules() if (region := region_of(m))]
    assert regions
    stats = stats_of(model)
    if regions[0].action is Action.RECOMPUTE:
        assert stats.checkpointed_calls > 0
        assert stats.replayed_calls > 0
        return
    assert stats.registered_tensors > 0
    assert stats.copied_out_tensors > 0
    assert stats.copied_in_tensors > 0


def small_llama(**options):
    return models.llama(**(SMALL | options))


def batch(seq_length=9, **more):
    return models.batch(seq_length=seq_length, **more)


def loss_on(inputs):
    """Return the loss of a language model on a batch, as a function of the model."""
    return lambda model: model(**inputs).loss


def trained(model, loss_of, seed=0):
    """Take one step; return all that must not differ: the loss, every gradient or its absence, the random stream."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = loss_of(model)
    after_forward = torch.get_rng_state()
    loss.backward()
    return {
        "loss": loss.detach(),
        "random stream after forward": after_forward,
        "random stream after backward": torch.get_rng_state(),
        **{name: p.grad for name, p in model.named_parameters()},
    }


def assert_identical(want, got):
    """The same names, and under each the same tensor bit for bit, or none."""
    assert want.keys() == got.keys()
    for name, tensor in want.items():
        assert (tensor is None) == (got[name] is None), name
        assert tensor is None or torch.equal(tensor, got[name]), name


def assert_trains_alike(plain, model, loss_of, steps=3):
    """Several steps, so that what a region learns in its first call is used in the later ones."""
    for seed in range(steps):
        assert_identical(trained(plain, loss_of, seed), trained(model, loss_of, seed))
