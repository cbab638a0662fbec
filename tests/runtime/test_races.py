"""Copies delayed, reordered and poisoned by seeded schedules: gradients stay exact."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memopt
from memopt.ir import policy
from tests import models
from tests.runtime.engines import cpu_engine
from tests.runtime.steps import SWAP, assert_equal_gradients, gradients

SEQ_LENGTH, TENSOR_BYTES = 64, 1 << 17


@pytest.fixture(autouse=True)
def small_tensors_are_swapped(monkeypatch):
    monkeypatch.setattr(policy, "MIN_SWAP_TENSOR_BYTES", TENSOR_BYTES)


def hidden(seed=1):
    x = models.hidden(seq_length=SEQ_LENGTH, seed=seed)
    assert x.nbytes == TENSOR_BYTES
    return x


@pytest.mark.filterwarnings("ignore:memopt. the host pool")
@given(
    seed=st.integers(0, 2**16),
    slowest_ms=st.sampled_from([0, 1, 8]),
    in_flight_bytes=st.sampled_from([0, 3 * TENSOR_BYTES, 1 << 30]),
    backward_order=st.permutations(range(2)),
    cap_bytes=st.sampled_from([TENSOR_BYTES, 5 * TENSOR_BYTES, 1 << 30]),
)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_schedule_of_copies_changes_a_gradient(seed, slowest_ms, in_flight_bytes, backward_order, cap_bytes):
    schedule = random.Random(seed)

    def delay_s():
        return schedule.choice((0, slowest_ms)) / 1000 * schedule.random()

    with cpu_engine(delay_s=delay_s, poison=True, cap_bytes=cap_bytes, in_flight_bytes=in_flight_bytes):
        plain, model = models.SharedAttention(), models.SharedAttention()
        handle = memopt.apply(model, SWAP, hidden())
        for one in (plain, model):
            losses = [one(hidden(seed=number)) for number in range(2)]
            for index in backward_order:
                losses[index].backward()
        assert_equal_gradients(gradients(plain), gradients(model))
        assert handle.stats().registered_tensors > 0
        del losses
