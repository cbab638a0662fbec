"""The region of every save of a layer, told by names and order alone."""

import pytest

from memopt.ir.regions import ALL_REGIONS, FUSED_PARTS, REGIONS, Save, regions_in

NORM = ["Pow", "Rsqrt", "Mul"]


def regions(*saves, claimed=()):
    """Return the regions of saves written as ``owner Node``; the layer itself is ``.``."""
    pairs = [save.split() for save in saves]
    return regions_in([Save("" if owner == "." else owner, f"{node}Backward0") for owner, node in pairs], claimed)


def table(text):
    """Return saves and regions of lines ``region owner Node``, where the region may be ``-``."""
    rows = [line.split() for line in text.strip().splitlines()]
    return [" ".join(row[1:]) for row in rows], [row[0].strip("-") for row in rows]


LLAMA = """
    attn_norm    input_layernorm Pow
    qkv_linear   self_attn.q_proj Mm
    qkv_linear   self_attn.v_proj Mm
    -            self_attn Mul
    core_attn    self_attn ScaledDotProductFlashAttention
    attn_proj    self_attn.o_proj Mm
    mlp_norm     post_attention_layernorm Pow
    mlp_fc1      mlp.gate_proj Mm
    mlp_act      mlp.act_fn Silu
    mlp_fc1      mlp.up_proj Mm
    mlp_act      mlp Mul
    mlp_fc2      mlp.down_proj Mm
"""
MLA = """
    qkv_linear   self_attn.q_a_proj Mm
    qk_norm      self_attn.q_a_layernorm Pow
    qkv_linear   self_attn.q_b_proj Mm
    qkv_linear   self_attn.kv_a_proj_with_mqa Mm
    -            self_attn Mul
    qk_norm      self_attn.kv_a_layernorm Pow
    qkv_linear   self_attn.kv_b_proj Mm
    core_attn    self_attn ScaledDotProductEfficientAttention
    attn_proj    self_attn.o_proj Mm
"""
EAGER = """
    qkv_linear   self_attn.q_proj Mm
    -            self_attn Mul
    core_attn    self_attn Bmm
    core_attn    self_attn Softmax
    core_attn    self_attn Mul
    core_attn    self_attn Bmm
    attn_proj    self_attn.o_proj Mm
    attn_proj    self_attn.resid_dropout Mul
    attn_proj    . Mul
"""
FUSED_EXPERTS = """
    mlp_norm     post_attention_layernorm Mul
    router       mlp Mul
    router       mlp.gate Mm
    router       mlp.gate Softmax
    expert_fc1   mlp.experts Index
    expert_fc1   mlp.experts GroupedMm
    expert_fc1   mlp.experts GroupedMm
    moe_act      mlp.experts MaskedFill
    moe_act      mlp.experts.act_fn Silu
    moe_act      mlp.experts Mul
    moe_fc2      mlp.experts GroupedMm
    moe_fc2      mlp.experts Mul
    moe_fc2      mlp.experts Index
    shared_expert mlp.shared_expert.gate_proj Mm
    shared_expert mlp.shared_expert.act_fn Silu
    shared_expert mlp.shared_expert_gate Mm
    shared_expert mlp Sigmoid
"""
LOOP_OF_EXPERTS = """
    expert_fc1   mlp.experts Index
    expert_fc1   mlp.experts Mm
    moe_act      mlp.experts Mul
    moe_fc2      mlp.experts Mm
    moe_fc2      mlp.experts IndexAdd
    expert_fc1   mlp.experts Mm
    moe_act      mlp.experts Mul
    moe_fc2      mlp.experts Mm
"""
EXPERTS_AS_MODULES = """
    router       block_sparse_moe.gate Mm
    router       block_sparse_moe Index
    expert_fc1   block_sparse_moe.experts.0.w1 Mm
    moe_act      block_sparse_moe.experts.0.act_fn Silu
    expert_fc1   block_sparse_moe.experts.0.w3 Mm
    moe_act      block_sparse_moe.experts.0 Mul
    moe_fc2      block_sparse_moe.experts.0.w2 Mm
    moe_fc2      block_sparse_moe Mul
    expert_fc1   block_sparse_moe.experts.1.w1 Mm
    moe_act      block_sparse_moe.experts.1.act_fn Silu
"""
EXPERTS_BESIDE_A_DENSE_MLP = """
    mlp_fc1      mlp.gate_proj Mm
    mlp_act      mlp.act_fn Gelu
    mlp_act      mlp Mul
    mlp_fc2      mlp.down_proj Mm
    router       router.proj Mm
    expert_fc1   experts Bmm
    moe_act      experts Mul
    moe_fc2      experts Bmm
"""
BERT = """
    qkv_linear   attention.self.query Addmm
    core_attn    attention.self ScaledDotProductEfficientAttention
    attn_proj    attention.output.dense Addmm
    attn_proj    attention.output.dropout Mul
    attn_norm    attention.output.LayerNorm NativeLayerNorm
    mlp_fc1      intermediate.dense Addmm
    mlp_act      intermediate.intermediate_act_fn Gelu
    mlp_fc2      output.dense Addmm
    mlp_fc2      output.dropout Mul
    mlp_norm     output.LayerNorm NativeLayerNorm
"""
GPT2 = """
    attn_norm    ln_1 NativeLayerNorm
    qkv_linear   attn.c_attn Addmm
    core_attn    attn ScaledDotProductEfficientAttention
    attn_proj    attn.c_proj Addmm
    attn_proj    attn.resid_dropout Mul
    mlp_norm     ln_2 NativeLayerNorm
    mlp_fc1      mlp.c_fc Addmm
    mlp_act      mlp.act Tanh
    mlp_fc2      mlp.c_proj Addmm
    mlp_fc2      mlp.dropout Mul
"""
OPT = """
    attn_proj    self_attn.out_proj Addmm
    attn_proj    . Mul
    mlp_norm     final_layer_norm NativeLayerNorm
    mlp_fc1      fc1 Addmm
    mlp_act      activation_fn Relu
    mlp_act      . Mul
    mlp_fc2      fc2 Addmm
    mlp_fc2      . Mul
"""
TWO_ATTENTIONS = """
    qkv_linear   self_attn.q_proj Mm
    core_attn    self_attn ScaledDotProductEfficientAttention
    attn_proj    self_attn.out_proj Mm
    attn_norm    encoder_attn_layer_norm NativeLayerNorm
    qkv_linear   encoder_attn.q_proj Mm
    -            encoder_attn Mul
    core_attn    encoder_attn ScaledDotProductEfficientAttention
    attn_proj    encoder_attn.out_proj Mm
    qkv_linear   self_attn.q_proj Mm
    -            self_attn Mul
    core_attn    self_attn ScaledDotProductEfficientAttention
"""
AROUND_AND_ELSE = """
    -            . Mul
    -            mamba.in_proj Mm
    -            mamba.norm Mul
    attn_norm    shared.input_layernorm Mul
    qkv_linear   shared.self_attn.q_proj.lora_A.default Mm
    core_attn    shared.self_attn Bmm
    mlp_fc1      shared.feed_forward.gate_up_proj Mm
    mlp_act      shared.feed_forward Mul
"""


@pytest.mark.parametrize(
    "layer",
    [
        LLAMA, MLA, EAGER, FUSED_EXPERTS, LOOP_OF_EXPERTS, EXPERTS_AS_MODULES, EXPERTS_BESIDE_A_DENSE_MLP, BERT, GPT2,
        OPT, TWO_ATTENTIONS, AROUND_AND_ELSE,
    ],
)  # fmt: skip
def test_the_regions_of_a_layer(layer):
    saves, expected = table(layer)
    assert list(zip(saves, regions(*saves), strict=True)) == list(zip(saves, expected, strict=True))


def test_a_claimed_module_has_a_region_of_its_own_and_the_others_stay_what_they_were():
    saves, expected = table(FUSED_EXPERTS)
    claimed = regions(*saves, claimed=["mlp.experts.act_fn", "mlp.gate"])
    own = {"mlp.experts.act_fn": "module:mlp.experts.act_fn", "mlp.gate": "module:mlp.gate"}
    assert claimed == [own.get(save.split()[0], region) for save, region in zip(saves, expected, strict=True)]


def test_a_claim_of_the_layer_itself_has_all():
    assert set(regions(*table(LLAMA)[0], claimed=[""])) == {"module:"}


def test_a_claim_is_no_prefix_of_a_name():
    assert regions("mlp.down_proj Mm", claimed=["mlp.down"]) == ["mlp_fc2"]


def test_what_a_recomputed_part_was_called_with_is_in_its_region():
    saves = [
        Save("input_layernorm"),
        Save("self_attn.q_proj", "MmBackward0"),
        Save("mlp.experts", "GroupedMmBackward0"),
        Save("mlp.experts"),
        Save("mlp.experts", "GroupedMmBackward0"),
    ]
    assert regions_in(saves) == ["attn_norm", "qkv_linear", "expert_fc1", "moe_act", "moe_fc2"]


def test_no_saves_have_no_regions():
    assert regions_in([]) == []


def test_the_fused_block_is_no_part_of_itself():
    assert set(FUSED_PARTS) < set(REGIONS)
    assert ALL_REGIONS[-1] not in REGIONS
