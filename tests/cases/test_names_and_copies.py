"""Names, classes, copies and shared parts stay what they were."""

import copy

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP

from tests.cases.rewriting import (
    assert_at_work,
    assert_identical,
    assert_trains_alike,
    batch,
    loss_on,
    small_llama,
    trained,
    twin,
)


def test_a_deep_copy_is_on_its_own(grain):
    """An averaged copy went on calling the original's layers, and never averaged (facebookresearch/fairscale#816)."""
    model, loss_of = twin(small_llama(), grain), loss_on(batch())
    trained(model, loss_of)
    average = copy.deepcopy(model)
    assert not set(average.modules()) & set(model.modules())
    with torch.no_grad():
        for p in average.parameters():
            p.add_(0.05)
    model.zero_grad()
    plain = small_llama(seed=1)
    plain.load_state_dict(average.state_dict())
    assert_trains_alike(plain, average, loss_of)
    assert all(p.grad is None for p in model.parameters())
    assert_at_work(model)
    assert_at_work(average)


def test_an_averaged_model_averages(grain):
    """As before (huggingface/accelerate#1971), by torch's own class."""
    model, loss_of = twin(small_llama(), grain), loss_on(batch())
    optimizer, average = torch.optim.SGD(model.parameters(), lr=0.1), AveragedModel(model)
    for seed in range(2):
        trained(model, loss_of, seed)
        optimizer.step()
        average.update_parameters(model)
    plain = small_llama(seed=1)
    plain.load_state_dict(average.module.state_dict())
    assert_trains_alike(plain, average.module, loss_of)
    assert_at_work(average.module)


def test_keys_and_names_are_unchanged_both_ways(grain):
    """Checkpoints were saved with a wrapper's prefix in every key (pytorch/pytorch#77224)."""
    plain = small_llama(num_hidden_layers=3)
    model = twin(plain, grain)
    for kind in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        assert [name for name, _ in getattr(model, kind)()] == [name for name, _ in getattr(plain, kind)()]
    assert list(model.state_dict()) == list(plain.state_dict())
    for one, other in ((plain, model), (model, plain)):
        assert not any(one.load_state_dict(other.state_dict()))
    assert_trains_alike(plain, model, loss_on(batch()))
    assert_at_work(model)


def test_layers_answer_for_themselves_and_can_be_operated_on(grain):
    """A wrapped layer had lost its attributes (huggingface/peft#2326)."""
    plain = small_llama(num_hidden_layers=3)
    model = twin(plain, grain)
    layers = model.model.layers
    assert len(layers[1:]) == 2
    assert layers[-1] is layers[2]
    layer = layers[1]
    assert isinstance(layer, LlamaDecoderLayer)
    assert isinstance(layer.self_attn, LlamaAttention)
    assert isinstance(layer.mlp, LlamaMLP)
    assert (layer.hidden_size, layer.self_attn.layer_idx, layer.mlp.gate_proj.out_features) == (32, 1, 48)
    assert model.get_submodule("model.layers.1.mlp") is layer.mlp
    assert model.get_parameter("model.layers.1.mlp.up_proj.weight") is layer.mlp.up_proj.weight
    assert type(model).__name__ == "LlamaForCausalLM"
    assert "(q_proj): Linear" in repr(model)
    assert_trains_alike(plain, model, loss_on(batch()))
    for other in (plain, model):  # learned tables must not outlive this
        other.model.layers[1].mlp.act_fn = nn.ReLU()
        other.model.layers[2].self_attn.o_proj = copy.deepcopy(plain.model.layers[0].self_attn.o_proj)
    assert_trains_alike(plain, model, loss_on(batch()))
    assert_at_work(model)


def adapted(base):
    """Put LoRA into a model, chosen by suffixes, with seeded weights."""
    torch.manual_seed(5)
    return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"])).train()


def test_adapters_on_top_are_found_trained_and_saved(grain, tmp_path):
    """An adapter file came out empty, since no name matched behind a wrapper (MakazhanAlpamys/Soup#1010)."""
    plain = small_llama()
    model = twin(plain, grain)
    saved = []
    for kind, base in (("plain", plain), ("rewritten", model)):
        with_adapters = adapted(base)
        optimizer = torch.optim.SGD((p for p in with_adapters.parameters() if p.requires_grad), lr=0.5)
        for seed in range(2):
            trained(with_adapters, loss_on(batch()), seed)
            optimizer.step()
        with_adapters.save_pretrained(tmp_path / kind, save_embedding_layers=False)
        saved.append(load_file(tmp_path / kind / "adapter_model.safetensors"))
    assert len(saved[0]) == 2 * 3 * 2  # layers, targets, A and B
    assert_identical(*saved)
    assert all(tensor.any() for name, tensor in saved[1].items() if "lora_B" in name)
    assert_at_work(model)


class SharingBlock(nn.Module):
    """A block with a norm, an activation and a plain function that others have too."""

    def __init__(self, norm, activation, function, width=8):
        super().__init__()
        self.norm, self.linear, self.activation, self.function = norm, nn.Linear(width, width), activation, function

    def forward(self, x):
        return x + self.function(self.activation(self.linear(self.norm(x))))


def sharing_blocks():
    norm, activation = nn.LayerNorm(8), nn.GELU()
    functions = (functional.silu, functional.silu, torch.tanh, torch.tanh)
    return nn.Sequential(*(SharingBlock(norm, activation, function) for function in functions))


def test_siblings_share_modules_and_functions(grain):
    """A mark on the shared function made the siblings look like one region (mindspore-ai/hyper-parallel#407)."""
    before, plain = dict(vars(functional.silu)), sharing_blocks()
    model, other, x = twin(plain, grain), twin(plain, grain), torch.randn(4, 8)
    assert vars(functional.silu) == before
    assert model[0].function is model[1].function is functional.silu
    assert len({block.norm for block in model}) == len({block.activation for block in model}) == 1
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    for one in (model, other):
        assert_trains_alike(plain, one, lambda m: m(x).square().mean())
        assert_at_work(one)
