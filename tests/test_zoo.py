"""The zoo is fit to compare training with: complete, quick to differ, and the same twice."""

import re

import pytest
import torch

from tests import zoo

UNTRAINED = {
    "big_bird": r"bert\.pooler\..*",
    "wav2vec2_conformer": r"wav2vec2_conformer\.encoder\.pos_conv_embed\..*",  # built, and never called
    "whisper": r"model\.encoder\.embed_positions\.weight",  # sinusoids
    "llava": r"model\.vision_tower\.(encoder\.layers\.2|post_layernorm)\..*",  # it takes the last layer's input
}
"""Parameters without a gradient; all others of every model have one."""

DROPS = {
    "gpt2", "gpt_neox", "opt", "bloom", "phi3", "mixtral", "bert", "modernbert", "big_bird", "wav2vec2_conformer", "t5",
    "bart", "whisper",
}  # fmt: skip
"""Models that draw random numbers in a step."""


@pytest.fixture(params=zoo.ZOO)
def name(request):
    return request.param


def test_the_zoo_is_large():
    assert len(zoo.ZOO) >= 28


def test_batches_are_of_models_in_the_zoo():
    assert zoo.BATCHES.keys() <= zoo.ZOO.keys()


def test_a_step_is_the_same_from_the_same_seed(name):
    """Neither the weights nor the step may depend on anything else."""
    first, second = (zoo.train_step(zoo.ZOO[name](), zoo.batch(name)) for _ in range(2))
    assert first["loss"].isfinite()
    assert zoo.differing(first, second) == []


def test_a_step_from_another_seed_differs_where_something_is_drawn(name):
    first, second = (zoo.train_step(zoo.ZOO[name](), zoo.batch(name), seed) for seed in (0, 1))
    differs = zoo.differing(first, second)
    assert bool(differs) == (name in DROPS)


def test_every_parameter_is_trained(name):
    """A gradient that is zero anyway would hide its loss."""
    model = zoo.ZOO[name]()
    zoo.train_step(model, zoo.batch(name))
    untrained = {key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert untrained == {key for key, _ in model.named_parameters() if re.fullmatch(UNTRAINED.get(name, "-"), key)}


def test_every_weight_is_drawn_or_set(name):
    """What a class leaves as it comes from the allocator would differ between processes."""
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        model = zoo.ZOO[name]()
    finally:
        torch.use_deterministic_algorithms(False)
    assert [key for key, tensor in model.state_dict().items() if tensor.isnan().any()] == []
