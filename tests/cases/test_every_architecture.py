"""Every model of the zoo trains alike with all swapped or recomputed that its blocks save, or their parts."""

import pytest

from tests import zoo
from tests.cases.rewriting import assert_at_work, assert_identical, swaps, twin


@pytest.mark.parametrize("name", zoo.ZOO)
def test_training_is_the_same_bit_for_bit(grain, name):
    plain = zoo.ZOO[name]()
    model = twin(plain, grain)
    # A cache changes no value, but strides and with them roundings; a checkpointed block does without.
    options = {} if swaps(grain) else {"use_cache": False}
    for seed in range(2):
        want = zoo.train_step(plain, zoo.batch(name, **options), seed)
        assert_identical(want, zoo.train_step(model, zoo.batch(name), seed))
    assert_at_work(model)
