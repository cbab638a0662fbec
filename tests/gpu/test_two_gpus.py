"""Two devices: a model spread over both, and a model sharded over both."""

import pytest
import torch
import torch.distributed as dist
from accelerate import dispatch_model
from torch.distributed.device_mesh import init_device_mesh

import memopt
from memopt.runtime import finish_copies
from memopt.runtime.engine import engine_of
from tests import models
from tests.distributed.processes import free_port
from tests.distributed.workers import enter_group, shard
from tests.runtime.engines import total_stats
from tests.runtime.steps import SWAP, assert_equal_gradients, step

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def spread():
    model = models.llama(num_hidden_layers=4, attn_implementation="eager")
    parts = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    return dispatch_model(model, parts | {f"model.layers.{n}": n // 2 for n in range(4)})


def test_a_model_spread_over_two_devices():
    inputs = {k: v.to("cuda:0") if isinstance(v, torch.Tensor) else v for k, v in models.batch().items()}
    plain, model = spread(), spread()
    handle = memopt.apply(model, SWAP)
    assert_equal_gradients(step(plain, inputs)[1], step(spread(), inputs)[1])  # the kernels repeat themselves
    for _ in range(3):
        (loss, grads), (other_loss, other_grads) = step(plain, inputs), step(model, inputs)
        assert torch.equal(loss, other_loss)
        assert_equal_gradients(grads, other_grads)
    # the last group of the first device is still there when backward wants it
    assert 0 < handle.stats().copied_in_tensors <= handle.stats().copied_out_tensors
    finish_copies(model)
    assert all(engine_of(torch.device("cuda", n)).pool.held_bytes > 0 for n in range(2))


def local_step(model, inputs):
    loss, grads = step(model, inputs)
    return loss, {name: grad.to_local().clone() for name, grad in grads.items()}


def fsdp2(rank, world, order, mixed):
    device = torch.device("cuda", rank)
    mesh = init_device_mesh("cuda", (world,))
    inputs = {
        k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in models.batch(4, 1024, seed=rank).items()
    }
    plain = shard(models.llama(num_hidden_layers=2, attn_implementation="eager").to(device), mesh, mixed)
    model = models.llama(num_hidden_layers=2, attn_implementation="eager").to(device)
    if order == "before":
        memopt.apply(model, SWAP, inputs)
    model = shard(model, mesh, mixed)
    if order != "before":
        memopt.apply(model, SWAP)
    assert_equal_gradients(local_step(plain, inputs)[1], local_step(plain, inputs)[1])  # the kernels repeat themselves
    for _ in range(3):
        (loss, grads), (other_loss, other_grads) = local_step(plain, inputs), local_step(model, inputs)
        assert torch.equal(loss, other_loss)
        assert_equal_gradients(grads, other_grads)
    assert total_stats(model).copied_out_tensors > 0


def join(rank, world, port, mixed):
    torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with enter_group("nccl", rank, world, port):
        for order in ("before", "first forward"):
            fsdp2(rank, world, order, mixed)
    assert not dist.is_initialized()


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "mixed"])
def test_fsdp2_on_two_devices(mixed):
    torch.multiprocessing.spawn(join, (2, free_port(), mixed), nprocs=2)
