"""Every model of the zoo trains alike with all swapped that its blocks save, or their parts."""

import pytest

from tests import zoo
from tests.cases.rewriting import assert_identical, assert_swapped, twin


@pytest.mark.parametrize("name", zoo.ZOO)
def test_training_is_the_same_bit_for_bit(grain, name):
    plain, inputs = zoo.ZOO[name](), zoo.batch(name)
    model = twin(plain, grain)
    for seed in range(2):
        assert_identical(zoo.train_step(plain, inputs, seed), zoo.train_step(model, inputs, seed))
    assert_swapped(model)
