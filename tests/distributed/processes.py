"""Processes that talk to each other, forked from a server that has imported what they need."""

import multiprocessing
import socket

import torch

multiprocessing.set_forkserver_preload(["tests.distributed.experts", "tests.distributed.pipelines"])


def start(enter, world, works):
    """Call ``enter(rank, world, port, works)`` in as many processes, and wait for all of them."""
    # each would import torch and transformers anew if it were spawned; the server has no threads that a fork could lose
    torch.multiprocessing.start_processes(enter, (world, free_port(), works), nprocs=world, start_method="forkserver")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
