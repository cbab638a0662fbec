import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memopt.runtime.pool import ALIGNMENT_BYTES, HostPool


def allocate(num_bytes):
    return torch.empty(num_bytes, dtype=torch.uint8)


def pool(cap_bytes=1 << 20, slab_bytes=1 << 16):
    return HostPool(allocate, cap_bytes=cap_bytes, slab_bytes=slab_bytes)


def test_a_block_has_exactly_the_bytes_asked_for_and_comes_back_whole():
    made = pool()
    block = made.take(1000)
    assert len(block.memory) == 1000
    assert made.in_use_bytes == block.size == 2 * ALIGNMENT_BYTES
    assert made.held_bytes == 1 << 16
    made.give(block)
    assert made.in_use_bytes == 0
    assert made.take(1000) is block


def test_freed_neighbors_become_one_gap_when_another_size_is_asked_for():
    made = pool(cap_bytes=1 << 16)
    blocks = [made.take(1 << 14) for _ in range(4)]
    assert made.take(1) is None
    for block in (blocks[2], blocks[0], blocks[1]):
        made.give(block)
    whole = made.take(3 << 14)
    assert whole is not None
    assert whole.start == 0
    assert made.held_bytes == 1 << 16


def test_a_request_beyond_a_slab_gets_one_of_its_own_and_the_cap_holds():
    made = pool(cap_bytes=200_000)
    assert len(made.take(150_000).memory) == 150_000
    assert made.held_bytes <= 200_000
    assert made.take(100_000) is None


def test_a_host_that_has_less_than_the_cap_promises():
    def refusing(num_bytes):
        raise RuntimeError("out of memory")

    assert HostPool(refusing, cap_bytes=1 << 30).take(10) is None


@given(st.lists(st.tuples(st.sampled_from([1, 512, 513, 5000, 40_000]), st.booleans()), max_size=60))
def test_blocks_never_overlap_and_nothing_is_lost(requests):
    made = pool()
    held = []
    for number, (num_bytes, give_one_back) in enumerate(requests):
        block = made.take(num_bytes)
        if block is not None:
            block.memory.fill_(number % 251)
            held.append((block, number % 251))
        if give_one_back and held:
            made.give(held.pop(0)[0])
        assert all(bool((block.memory == fill).all()) for block, fill in held)
    assert made.in_use_bytes == sum(block.size for block, _ in held)
    for block, _ in held:
        made.give(block)
    assert made.in_use_bytes == 0
    made._join_waiting()
    assert made._gaps == [[(0, len(slab))] for slab in made._slabs]


def test_varying_sizes_reuse_the_same_memory():
    made = pool()
    for size in range(600, 60_000, 700):
        made.give(made.take(size))
    assert made.held_bytes == 1 << 16


@pytest.mark.parametrize("num_bytes", [0, 1])
def test_the_smallest(num_bytes):
    made = pool()
    block = made.take(num_bytes)
    assert len(block.memory) == num_bytes
    made.give(block)
    assert made.in_use_bytes == 0
