"""What runs in each gloo process. Kept apart from the tests: a spawned process imports this module."""

import contextlib
import gc
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt.ir import CheckpointPolicy
from memopt.runtime.engine import engine_of
from tests import models, zoo
from tests.runtime.engines import cpu_engine, total_stats
from tests.runtime.parts import words
from tests.runtime.steps import SWAP

NUM_STEPS = 4
"""Of checkpointed models: the first two teach a region what the others use."""


@contextlib.contextmanager
def enter_group(backend, rank, world, port):
    """Be in a process group."""
    gc.freeze()  # the collector need not look at all that was imported
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group(backend, rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


ORDERS = ("before", "after", "first forward")


def enter(rank, world, port, works):
    """Do works under a poisoned engine: rewritten before, after and on the first forward, or as a work says."""
    torch.set_num_threads(1)
    with enter_group("gloo", rank, world, port):
        for work, options, *orders in works:
            for order in orders or ORDERS:
                try:
                    with cpu_engine(poison=True):
                        work(rank, world, order, **options)
                except BaseException as error:
                    error.add_note(f"{work.__name__} on rank {rank}, rewritten {order}, with {options}")
                    raise


def batch(rank, mixed=False):
    """Return a batch whose attention saves reach the 1 MiB of the unchanged policy."""
    return models.batch(seq_length=1024 if mixed else 512, seed=rank)


def shard(model, mesh, mixed):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if mixed else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def swap_everything(model):
    """Wrap each self_attn with a policy that takes all it can: small models must take part too."""
    for layer in model.model.layers:
        memopt.swap_wrapper(layer.self_attn, everything)


def everything(tensor):
    return CheckpointPolicy.MUST_SWAP


def fsdp2(rank, world, order, mixed):
    """Three steps of a sharded model beside one that is not rewritten."""
    mesh = init_device_mesh("cpu", (world,))
    plain = shard(models.llama(num_hidden_layers=2), mesh, mixed)
    model = models.llama(num_hidden_layers=2)
    if order == "before":
        swap_everything(model)
    model = shard(model, mesh, mixed)
    if order == "after":
        swap_everything(model)
    handle = memopt.apply(model, SWAP) if order == "first forward" else None
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    inputs = batch(rank, mixed)
    for _ in range(3):
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            one(**inputs).loss.backward()
        for name, p, q in zip(names, plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(p.grad.to_local(), q.grad.to_local()), name
        for optimizer in optimizers:
            optimizer.step()
    stats = total_stats(model)
    assert stats.copied_in_tensors == stats.copied_out_tensors > 0
    if handle:
        assert handle.plan.graph.input.dtype == ("bfloat16" if mixed else "float32")
        swapped = memopt.ir.account(handle.plan)
        assert stats.copied_out_bytes == 3 * swapped.swap_bytes
    weights = sum(p.numel() * 4 for layer in model.model.layers for p in layer.self_attn.parameters())
    assert engine_of(torch.device("cpu")).pool.held_bytes < 64 << 20
    assert weights > 0
    memopt.undo(model)
    assert all(type(m).__name__ != "LlamaAttention" or "[" not in m._get_name() for m in model.modules())
    assert torch.equal(plain(**inputs).loss, model(**inputs).loss)


def ddp(rank, world, order, accumulate):
    """Three steps under DDP, gradient accumulation with no_sync included."""
    plain = DistributedDataParallel(models.llama(num_hidden_layers=2))
    model = models.llama(num_hidden_layers=2)
    if order == "before":
        memopt.apply(model, SWAP, batch(rank))
    model = DistributedDataParallel(model)
    if order == "after":
        memopt.apply(model, SWAP, batch(rank))
    if order == "first forward":
        memopt.apply(model, SWAP)
    for number in range(3):
        for one in (plain, model):
            one.zero_grad()
            if accumulate:
                with one.no_sync():
                    one(**models.batch(batch_size=4, seq_length=256, seed=number)).loss.backward()
            one(**batch(rank)).loss.backward()
        for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), name
    assert total_stats(model).copied_out_tensors > 0


def ddp_offloaded(rank, world, order, config, accumulate):
    """Steps under DDP with parts of layers offloaded and recomputed, beside a model that is not rewritten."""
    plain = DistributedDataParallel(zoo.ZOO["llama"](num_hidden_layers=3))
    model = zoo.ZOO["llama"](num_hidden_layers=3)
    inputs = words(12, seed=rank)
    if order == "before":
        handle = memopt.apply(model, config, inputs)
    model = DistributedDataParallel(model)
    if order == "after":
        handle = memopt.apply(model, config, inputs)
    if order == "first forward":
        handle = memopt.apply(model, config)
    for number in range(3):
        for one in (plain, model):
            one.zero_grad()
            if accumulate:
                with one.no_sync():
                    one(**words(7, seed=number)).loss.backward()
            one(**inputs).loss.backward()
        for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), name
    stats = total_stats(model)
    assert stats.copied_in_bytes == stats.copied_out_bytes > 0
    assert stats.checkpointed_calls == stats.replayed_calls > 0
    if not accumulate:
        assert stats.copied_out_bytes == 3 * memopt.ir.account(handle.plan).swap_bytes


def checkpoint(model, mode):
    """Recompute the layers by a plan that was made of a model which is not sharded."""
    graph = memopt.analyze(models.llama(num_hidden_layers=2), models.batch(batch_size=1, seq_length=16))
    memopt.apply(model, memopt.plan(graph, activation_checkpoint=mode))


def fsdp2_checkpointed(rank, world, order, mode, mixed, nested):
    """Steps of a sharded model beside one that is not rewritten: gradients, and how often weights are gathered."""
    mesh = init_device_mesh("cpu", (world,))
    plain = shard_small(models.llama(num_hidden_layers=2), mesh, mixed, nested)
    model = models.llama(num_hidden_layers=2)
    if order == "before":
        checkpoint(model, mode)
    model = shard_small(model, mesh, mixed, nested)
    if order == "after":
        checkpoint(model, mode)
    if order == "first forward":
        memopt.apply(model, {"activation_checkpoint": mode})
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    inputs = models.batch(batch_size=2, seq_length=32, seed=rank)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for _ in range(NUM_STEPS):
        num_gathers = []
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            with CountingGathers() as gathers:
                one(**inputs).loss.backward()
            num_gathers.append(gathers.count)
        for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(p.grad.to_local(), q.grad.to_local()), name
        if not nested:
            assert num_gathers[0] == num_gathers[1] > 0
        for optimizer in optimizers:
            optimizer.step()
    stats = total_stats(model)
    assert stats.replayed_calls == stats.checkpointed_calls == NUM_STEPS * 2
    memopt.undo(model)
    assert torch.equal(plain(**inputs).loss, model(**inputs).loss)


def shard_small(model, mesh, mixed, nested):
    """Shard a model; nested: also the MLP inside each layer."""
    if nested:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if mixed else MixedPrecisionPolicy()
        for layer in model.model.layers:
            fully_shard(layer.mlp, mesh=mesh, mp_policy=policy)
    return shard(model, mesh, mixed)


class CountingGathers(TorchDispatchMode):
    """Count the all-gathers of weights."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "allgather" in func.name() or "all_gather_into_tensor" in func.name()
        return func(*args, **(kwargs or {}))


def ddp_checkpointed(rank, world, order, mode, accumulate):
    """Steps under DDP beside a model that is not rewritten."""
    plain = DistributedDataParallel(models.llama(num_hidden_layers=2))
    model = models.llama(num_hidden_layers=2)
    if order == "before":
        checkpoint(model, mode)
    model = DistributedDataParallel(model)
    if order == "after":
        checkpoint(model, mode)
    if order == "first forward":
        memopt.apply(model, {"activation_checkpoint": mode})
    inputs = models.batch(batch_size=2, seq_length=32, seed=rank)
    for number in range(NUM_STEPS):
        for one in (plain, model):
            one.zero_grad()
            if accumulate:
                with one.no_sync():
                    one(**models.batch(batch_size=1, seq_length=32, seed=number)).loss.backward()
            one(**inputs).loss.backward()
        for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), name
    stats = total_stats(model)
    assert stats.replayed_calls == stats.checkpointed_calls == NUM_STEPS * 2 * (1 + accumulate)
