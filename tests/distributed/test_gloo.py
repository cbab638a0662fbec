"""FSDP2 and DDP on one and two processes of this machine."""

import socket

import pytest
import torch

from tests.distributed import workers


def run(world, work, *args):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(workers.enter, (world, port, work, *args), nprocs=world)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "mixed"])
def test_fsdp2(world, mixed):
    run(world, workers.fsdp2, mixed)


@pytest.mark.parametrize(("world", "accumulate"), [(1, False), (2, True)])
def test_ddp(world, accumulate):
    run(world, workers.ddp, accumulate)
