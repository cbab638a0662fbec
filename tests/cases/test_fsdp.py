"""FSDP2 on top of a rewriting, in one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests.cases.rewriting import assert_at_work, batch, small_llama, trained, twin


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_of_two_forwards(model):
    """Run the model twice before the one backward."""
    inputs = batch()
    flipped = {**inputs, "input_ids": inputs["input_ids"].flip(1)}
    return model(**inputs).loss * model(**flipped).loss


def test_blocks_sharded_after_the_rewriting(grain, mesh):
    """Whatever ran in backward found sharded or empty weights (pytorch/pytorch#187437)."""
    plain = small_llama(num_hidden_layers=3)
    plain.model.layers[0].requires_grad_(False)
    model = twin(plain, grain)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for seed in range(3):
        want, got = trained(plain, loss_of_two_forwards, seed), trained(model, loss_of_two_forwards, seed)
        assert want.keys() == got.keys()
        for name, tensor in want.items():
            assert (tensor is None) == (got[name] is None), name
            torch.testing.assert_close(whole(got[name]), tensor)
    assert all(isinstance(layer, LlamaDecoderLayer) for layer in model.model.layers)
    assert_at_work(model)
