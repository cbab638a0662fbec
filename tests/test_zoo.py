"""The zoo is fit to compare training with: complete, quick to differ, and the same twice."""

import re

import pytest
import torch

from tests import zoo

UNTRAINED = {
    "whisper": r"model\.encoder\.embed_positions\.weight",  # sinusoids
    "llava": r"model\.vision_tower\.(encoder\.layers\.2|post_layernorm)\..*",  # it takes the last layer's input
}
"""Parameters without a gradient; all others of every model have one."""

DROPS = {"gpt2", "gpt_neox", "opt", "bloom", "phi3", "mixtral", "bert", "modernbert", "t5", "bart", "whisper"}
"""Models that draw random numbers in a step."""


@pytest.fixture(params=zoo.ZOO)
def name(request):
    return request.param


def test_the_zoo_is_large():
    assert len(zoo.ZOO) >= 28


def test_batches_are_of_models_in_the_zoo():
    assert zoo.BATCHES.keys() <= zoo.ZOO.keys()


def test_a_step_is_the_same_from_the_same_seed(name):
    """Built anew, too: neither the weights nor the step may depend on anything else."""
    steps = [zoo.train_step(zoo.ZOO[name](), zoo.batch(name)) for _ in range(2)]
    model = zoo.ZOO[name]()
    steps += [zoo.train_step(model, zoo.batch(name)) for _ in range(2)]
    first, *others = steps
    assert first["loss"].isfinite()
    for other in others:
        assert zoo.differing(first, other) == []


def test_a_step_from_another_seed_differs_where_something_is_drawn(name):
    model, inputs = zoo.ZOO[name](), zoo.batch(name)
    differs = zoo.differing(zoo.train_step(model, inputs, seed=0), zoo.train_step(model, inputs, seed=1))
    assert bool(differs) == (name in DROPS)


def test_every_parameter_is_trained(name):
    """A gradient that is zero anyway would hide its loss."""
    step = zoo.train_step(zoo.ZOO[name](), zoo.batch(name))
    trained = {key for key, gradient in step.items() if gradient is not None and gradient.any()}
    assert step.keys() - trained == {key for key in step if re.fullmatch(UNTRAINED.get(name, "-"), key)}


def test_every_weight_is_drawn_or_set(name):
    """What a class leaves as it comes from the allocator would differ between processes."""
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        model = zoo.ZOO[name]()
    finally:
        torch.use_deterministic_algorithms(False)
    assert [key for key, tensor in model.state_dict().items() if tensor.isnan().any()] == []
