"""The facts that checkpointing is planned with: expensive functions, what modules are given, and what they compute."""

import json
from importlib import resources

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig

import memopt
from memopt.ir import Family
from tests import models

LAYER = "model.layers.0"
TOKENS = 2 * 512


def functions(graph, fqn=LAYER):
    """Return the functions that were called in a module, each with where, seen from there."""
    calls = {call.index: call.fqn.removeprefix(f"{fqn}.") for call in graph.calls if call.fqn.startswith(fqn)}
    return [(calls[f.call], f) for f in graph.functions if f.call in calls]


def traced(model, inputs=None, **options):
    return memopt.analyze(model, models.batch() if inputs is None else inputs, **options)


@pytest.fixture(scope="module")
def llama():
    return traced(models.llama(num_hidden_layers=1).bfloat16(), target_device="cuda")


@pytest.fixture(scope="module")
def qwen3_moe():
    return traced(models.qwen3_moe(num_hidden_layers=1), target_device="cpu")


def test_the_functions_of_a_dense_layer(llama):
    mm, sdpa = Family.MM, Family.ATTENTION
    assert [(name, f.family) for name, f in functions(llama)] == [
        *((f"self_attn.{name}_proj", mm) for name in "qkv"),
        ("self_attn", sdpa),
        ("self_attn.o_proj", mm),
        *((f"mlp.{name}_proj", mm) for name in ("gate", "up", "down")),
    ]
    assert all(f.keepable for _, f in functions(llama))


def test_the_functions_of_an_expert_layer(qwen3_moe):
    grouped = Family.GROUPED_MM
    assert [(name, f.family, f.keepable) for name, f in functions(qwen3_moe)][-3:] == [
        ("mlp.gate", Family.MM, True),
        ("mlp.experts", grouped, True),
        ("mlp.experts", grouped, True),
    ]


def test_each_function_owns_its_saves(llama):
    for name, function in functions(llama):
        saves = llama.saved[function.first_save : function.end_save]
        assert {save.op for save in saves} == ({"ScaledDotProductFlashAttention"} if name == "self_attn" else {"Mm"})
        assert {save.call for save in saves} == {function.call}


def test_what_a_function_returns_is_what_the_next_one_saves(llama):
    [value] = [f for name, f in functions(llama) if name == "self_attn.v_proj"]
    [sdpa] = [f for name, f in functions(llama) if name == "self_attn"]
    saved = {save.field: save for save in llama.saved[sdpa.first_save : sdpa.end_save]}
    assert value.outputs == ((saved["value"].storage, TOKENS * 256 * 2),)
    assert sdpa.outputs == ((saved["output"].storage, saved["output"].storage_bytes),)
    statistics = {saved[field].storage: saved[field].storage_bytes for field in ("logsumexp", "rng_state", "unused")}
    assert dict(sdpa.statistics) == statistics
    assert value.statistics == ()


def test_the_operations_of_a_dense_layer(llama):
    projections, attention = 4 * 256 * 256, 2 * 512 * 256  # per token and multiplication; q, k, v, o and both products
    mlp = 3 * 256 * 512
    flops = {call.fqn: call.flops for call in llama.calls}
    assert flops[f"{LAYER}.mlp"] == 2 * TOKENS * mlp
    assert flops[f"{LAYER}.self_attn"] == 2 * TOKENS * (projections + attention)
    assert flops[LAYER] == 2 * TOKENS * (projections + attention + mlp) == sum(f.flops for _, f in functions(llama))
    assert flops[""] == flops["model"] + flops["lm_head"] == flops["model"] + 2 * TOKENS * 256 * models.VOCAB
    assert flops[f"{LAYER}.input_layernorm"] == 0


@pytest.mark.parametrize("target_device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_every_kernel_counts_the_same(target_device, dtype, attn_implementation):
    """Two layers: what comes from the trace's cache counts as what does not."""
    model = models.qwen3_moe(num_hidden_layers=2, attn_implementation=attn_implementation).to(dtype)
    graph = traced(model, target_device=target_device)
    projections, attention = 256 * (256 + 128 + 128 + 256), 2 * 512 * 256
    experts = 256 * 8 + 2 * 3 * 256 * 128  # the router, then two experts a token
    for layer in (0, 1):
        (call,) = graph.calls_of(f"model.layers.{layer}")
        assert call.flops == 2 * TOKENS * (projections + attention + experts)


@pytest.mark.parametrize("build", [models.llama, models.gpt2])
def test_the_operations_are_those_that_torch_counts(build):
    """With eager attention: torch has no formula for the CPU's fused kernel."""
    model, inputs = build(attn_implementation="eager"), models.batch(seq_length=64)
    with FlopCounterMode(display=False) as counter:
        model(**inputs)
    assert traced(model, inputs).calls[0].flops == counter.get_total_flops() > 0


def test_30b_operations_are_those_of_its_active_parameters():
    facts = json.loads((resources.files("memopt.presets") / "qwen3-30b-a3b.json").read_text())
    graph = memopt.analyze(AutoConfig.for_model(**facts), seq_length=64)
    active = 48 * (2048 * (4096 + 512 + 512 + 4096) + 2048 * 128 + 8 * 3 * 2048 * 768) + 2048 * 151936
    attention = 48 * 2 * 64 * 4096
    rope = 2 * 64 * 64  # a product of matrices, or none, by the version of transformers
    assert graph.calls[0].flops - 2 * 64 * (active + attention) in (0, rope)


def test_a_convolution_and_a_product_with_another_dtype_count():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(8, 16, 3, padding=1)

        def forward(self, x):
            y = self.conv(x)
            return torch.bmm(y, y.transpose(1, 2), out_dtype=torch.float32).sum()

    graph = traced(Mixed().bfloat16(), torch.randn(2, 8, 32, dtype=torch.bfloat16))
    assert [(f.family, f.flops) for f in graph.functions] == [
        (Family.CONVOLUTION, 2 * 2 * 32 * 8 * 16 * 3),
        (Family.BMM, 2 * 2 * 16 * 32 * 16),
    ]


def keepable(forward, *, trained=True):
    """Return, for each function of a module with one square weight, whether its results can stand for it."""

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64), requires_grad=trained)

        def forward(self, x):
            return forward(x, self.weight)

    graph = traced(Module(), torch.randn(64, 64, requires_grad=True))
    return [f.keepable for f in graph.functions]


def written(x, w):
    y = nn.functional.linear(x, w)
    y += 1
    return y.exp()


def written_through_a_view(x, w):
    y = x @ w
    y[0].zero_()
    return y.exp()


def written_in_another_module_later(x, w):
    y = x @ w
    z = (y @ w).exp()
    y.mul_(2)
    return z


def dropped(x, w):
    query = (x @ w).view(1, 1, 64, 64)
    return nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5)


def permuted(x, w):
    return torch.einsum("ab,bc->ca", x, w).exp()


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda x, w: (x @ w).exp(), [True]),
        (lambda x, w: (x @ w).view(-1).exp(), [True]),
        (written, [False]),
        (written_through_a_view, [False]),
        (written_in_another_module_later, [False, True]),
        (dropped, [True, False]),
        (permuted, [True]),
    ],
)
def test_whose_results_can_stand_for_it(forward, expected):
    assert keepable(forward) == expected


def test_a_function_that_saves_a_large_tensor_of_its_own_must_run_again():
    """No fused kernel takes float32 with fewer key heads than query heads: the scores are saved."""
    graph = traced(models.qwen3_moe(num_hidden_layers=1), target_device="cuda")
    assert [f.keepable for name, f in functions(graph) if name == "self_attn"] == [False]


def test_autocast_copies_of_operands_are_explained():
    graph = traced(models.llama(num_hidden_layers=1), autocast="bfloat16", target_device="cpu")
    assert [f.keepable for _, f in functions(graph)] == [True] * 8


def test_biases_that_are_added_in_place_are_writes():
    config = GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm").train()
    graph = traced(model, {"input_ids": torch.zeros(2, 16, dtype=torch.long), "use_cache": False})
    grouped = [f for f in graph.functions if f.family is Family.GROUPED_MM]
    assert [f.keepable for f in grouped] == [False, False]


class Given(nn.Module):
    """A module that is given tensors in every way, some of them twice."""

    def __init__(self):
        super().__init__()
        self.inner = Taking()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x):
        from transformers import BatchEncoding

        y, z = x.exp(), x.sin()
        batch = BatchEncoding({"z": z, "w": [z.view(-1)]})
        return self.inner(
            y, y[:1], {"scale": self.scale, "shift": self.shift}, batch=batch, other=(y.cos(),), flag=None
        )


class Taking(nn.Module):
    def forward(self, y, part, named, *, batch, other, flag):
        return y * named["scale"] + named["shift"] + batch["z"] + other[0]


def test_what_a_module_is_given():
    graph = traced(Given(), torch.randn(3, 4, requires_grad=True))
    (call,) = graph.calls_of("inner")
    assert [size for _, size in call.inputs] == [48, 48, 48]
    saved = {save.op: save.storage for save in graph.saved}
    assert call.inputs[0][0] == saved["Exp"]  # what exp saves is its result
    assert graph.calls[0].inputs[0][0] in graph.held


def test_saves_that_were_dropped_move_the_functions():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            x.exp()
            return (x @ self.weight).sin()

    graph = traced(Dropping(), torch.randn(8, 8, requires_grad=True))
    assert [(f.first_save, f.end_save) for f in graph.functions] == [(0, 2)]
    assert [save.op for save in graph.saved] == ["Mm", "Mm", "Sin"]


def test_arguments_that_hold_themselves_hold_no_tensors():
    class Looped(nn.Module):
        def forward(self, x):
            looped = [x]
            looped.append(looped)
            return self.inner(x, looped)

        def __init__(self):
            super().__init__()
            self.inner = Second()

    class Second(nn.Module):
        def forward(self, x, looped):
            return x.exp()

    assert traced(Looped(), torch.randn(4, requires_grad=True)).calls[1].inputs == ()
