"""FSDP2 and DDP on one and two processes of this machine."""

import pytest

from tests.distributed import experts, workers
from tests.distributed.processes import start
from tests.runtime.checkpoints import MODES
from tests.runtime.offloads import offload, recompute


def run(world, *works):
    """Do some works, each a function and its options, one after another in the same processes."""
    start(workers.enter, world, works)


@pytest.mark.parametrize(("world", "orders"), [(1, ("first forward",)), (2, ("before", "after"))])
def test_fsdp2(world, orders):
    run(world, (workers.fsdp2, {"mixed": False}, *orders), (workers.fsdp2, {"mixed": True}, orders[-1]))


@pytest.mark.parametrize(("world", "accumulate", "order"), [(1, False, "first forward"), (2, True, "before")])
def test_ddp(world, accumulate, order):
    run(world, (workers.ddp, {"accumulate": accumulate}, order))


def test_ddp_offloaded():
    asked = offload("core_attn", "attn_proj", "mlp_norm", fraction=0.8) | recompute("layernorm")
    run(2, *((workers.ddp_offloaded, {"config": asked, "accumulate": more}) for more in (False, True)))


@pytest.mark.parametrize("mode", MODES)
def test_fsdp2_checkpointed(mode):
    options = ({"mixed": False, "nested": False}, {"mixed": True, "nested": True})
    run(2, *((workers.fsdp2_checkpointed, {"mode": mode} | more) for more in options))


def test_ddp_checkpointed():
    options = ({"mode": "full", "accumulate": True}, {"mode": "selective", "accumulate": False})
    run(2, *((workers.ddp_checkpointed, more) for more in options))


def test_experts_on_two_processes_offloaded():
    run(2, (experts.offloaded, {}))
