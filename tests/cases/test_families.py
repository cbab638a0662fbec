"""Families of models whose parts have other names, other places and other shapes than Llama's."""

import pytest
import torch
import transformers

from tests import models
from tests.cases.rewriting import SMALL, assert_at_work, assert_trains_alike, batch, loss_on, twin

TINY = {"vocab_size": models.VOCAB, "hidden_size": 32}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4}


def built(family, head, **options):
    """Return a model of a family from its configuration class, with seeded weights."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**options)
    return getattr(transformers, f"{family.removesuffix('Text')}{head}")(config).train()


def assert_same_keys(plain, model):
    assert list(model.state_dict()) == list(plain.state_dict())


NAMES = {
    "attn": lambda: models.gpt2(n_embd=32, n_layer=2),
    "attention": lambda: built(
        "GPTNeoX", "ForCausalLM", **TINY, **LAYERS, intermediate_size=48, hidden_dropout=0.1
    ),
    "self_attention": lambda: built("Falcon", "ForCausalLM", **TINY, **LAYERS),
    "self_attention with alibi": lambda: built(
        "Bloom", "ForCausalLM", **TINY, n_layer=2, n_head=4, hidden_dropout=0.1
    ),
    "attention.self": lambda: built("Bert", "ForMaskedLM", **TINY, **LAYERS, intermediate_size=48),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_attention_by_any_other_name(grain, name):
    """Tools that look for model.layers and self_attn find nothing here (p-e-w/heretic#219)."""
    plain = NAMES[name]()
    plain.config.use_cache = False
    model = twin(plain, grain)
    assert_same_keys(plain, model)
    inputs = batch()
    inputs = {"input_ids": inputs["input_ids"], "labels": inputs["labels"]}
    assert_trains_alike(plain, model, loss_on({**inputs, "attention_mask": torch.ones_like(inputs["labels"])}))
    assert_at_work(model)


LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MIXERS = {
    "state space": lambda: built("Mamba", "ForCausalLM", **TINY, state_size=4, num_hidden_layers=2),
    "linear and full attention": lambda: built(
        "Qwen3Next", "ForCausalLM", **(TINY | SMALL | LINEAR), num_attention_heads=4, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
    ),
    "attention shared by layers": lambda: built(
        "Zamba2", "ForCausalLM", **TINY, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, attention_head_dim=16, layers_block_type=["mamba", "hybrid"] * 2, mamba_d_state=4,
        mamba_ngroups=1, n_mamba_heads=4, mamba_headdim=16, num_mem_blocks=1, adapter_rank=4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("mixer", MIXERS)
def test_hybrids_and_state_spaces_train_and_generate(grain, mixer):
    """Memory tools that know attention only miss them (jsboige/CoursIA#12720, NVIDIA/Megatron-LM#4496)."""
    plain = MIXERS[mixer]()
    model = twin(plain, grain)
    assert_same_keys(plain, model)
    assert_trains_alike(plain, model, loss_on(batch()), steps=2)
    assert_at_work(model)
    prompt, tokens = batch()["input_ids"][:, :4], []
    for one in (plain.eval(), model.eval()):
        tokens.append(one.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0))
    assert torch.equal(*tokens)


def test_keys_and_values_that_later_layers_borrow(grain):
    """A dict carries them past the layers' outputs; their makers lost gradients (unslothai/unsloth-zoo#813)."""
    plain = built(
        "Gemma4Text", "ForCausalLM", **(TINY | SMALL | {"num_hidden_layers": 6}), num_attention_heads=4,
        global_head_dim=8, num_kv_shared_layers=4, layer_types=["sliding_attention", "full_attention"] * 3,
        vocab_size_per_layer_input=models.VOCAB, hidden_size_per_layer_input=8,
    )  # fmt: skip
    model = twin(plain, grain)
    assert_trains_alike(plain, model, loss_on(batch()))
    makers = {n: p for n, p in model.named_parameters() if n.endswith("layers.0.self_attn.k_proj.weight")}
    assert len(makers) == 1
    assert all(p.grad.any() for p in makers.values())
    assert_at_work(model)


def test_complex_rotary_factors_and_chunked_attention(grain):
    """Offloading stopped on Llama 4, whose rotary factors are complex (meta-pytorch/torchtune#2709)."""
    plain = built(
        "Llama4Text", "ForCausalLM", **(TINY | SMALL | {"num_hidden_layers": 4}), num_attention_heads=4,
        intermediate_size_mlp=48, num_local_experts=2, interleave_moe_layer_step=2, attention_chunk_size=8,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in plain.named_parameters():
            if "experts" in name:  # which its class leaves as they come from the allocator
                p.normal_(std=0.02, generator=generator)
    model = twin(plain, grain)
    assert_same_keys(plain, model)
    assert_trains_alike(plain, model, loss_on(batch(13)))
    assert_at_work(model)
