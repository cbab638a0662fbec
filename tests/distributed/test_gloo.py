"""FSDP2 and DDP on one and two processes of this machine."""

import socket

import pytest
import torch

from tests.distributed import workers


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(world, work, *args):
    torch.multiprocessing.spawn(workers.enter, (world, free_port(), work, *args), nprocs=world)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "mixed"])
def test_fsdp2(world, mixed):
    run(world, workers.fsdp2, mixed)


@pytest.mark.parametrize(("world", "accumulate"), [(1, False), (2, True)])
def test_ddp(world, accumulate):
    run(world, workers.ddp, accumulate)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize(("mixed", "nested"), [(False, False), (True, True)], ids=["float32", "mixed nested"])
def test_fsdp2_checkpointed(mode, mixed, nested):
    run(2, workers.fsdp2_checkpointed, mode, mixed, nested)


@pytest.mark.parametrize(("mode", "accumulate"), [("full", True), ("selective", False)])
def test_ddp_checkpointed(mode, accumulate):
    run(2, workers.ddp_checkpointed, mode, accumulate)
