import json
from importlib import resources

import pytest
import torch
from torch import nn
from transformers import AutoConfig

import memopt
from memopt.errors import GraphCompileError, IllegalValueError, RequestError, TraceError
from memopt.ir import Kind, outermost
from tests import models


def preset(name):
    facts = json.loads((resources.files("memopt.presets") / f"{name}.json").read_text())
    return AutoConfig.for_model(**facts)


def test_qwen3_30b_a3b_covers_49_mib_a_layer():
    graph = memopt.analyze(preset("qwen3-30b-a3b"), seq_length=1024, dtype="bfloat16")
    plan = memopt.plan(graph, activation_swap="attention")
    account = memopt.ir.account(plan)
    assert [t.fqn for t in account.targets] == [f"model.layers.{n}.self_attn" for n in range(48)]
    assert {t.covered_bytes for t in account.targets} == {51_380_224}
    assert graph.model.num_parameters == 30_532_122_624
    # GQA is not expanded and no mask is materialized: the naive fake trace says 63 MiB
    assert {t.shape for t in graph.saved if t.field == "key"} == {(1, 4, 1024, 128)}


def test_the_live_model_is_neither_run_nor_changed():
    model = models.llama(attention_dropout=0.1)
    fired = []
    model.model.layers[0].register_forward_hook(lambda *args: fired.append(args))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    rng = torch.get_rng_state()
    model.eval()
    memopt.analyze(model, models.batch(seq_length=16))
    assert not fired
    assert not model.training
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_inputs_by_position_and_models_that_are_not_of_transformers():
    graph = memopt.analyze(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(3, 8))
    assert [(t.owner, t.op, t.shape) for t in graph.saved if t.kind is Kind.ACTIVATION] == [
        ("0", "Addmm", (3, 8)),
        ("1", "Relu", (3, 8)),
    ]
    assert (graph.input.batch_size, graph.input.seq_length) == (3, 8)
    assert graph.input.target_device == "cpu"


def test_every_call_of_a_module_used_again_counts():
    cell = nn.Linear(8, 8)

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = cell

        def forward(self, x):
            for _ in range(5):
                x = self.cell(x).tanh()
            return x

    graph = memopt.analyze(Recurrent(), torch.randn(2, 8))
    assert len(graph.calls_of("cell")) == 5
    assert len([t for t in graph.saved if t.op == "Tanh"]) == 5


def test_a_shared_module_is_one_node_under_all_its_names():
    graph = memopt.analyze(models.SharedAttention(), models.hidden(seq_length=8))
    assert outermost(graph, "self_attn") == ("blocks.0.self_attn", "blocks.1.self_attn")
    assert graph.by_fqn["blocks.2.self_attn"] is graph.by_fqn["blocks.0.self_attn"]
    assert graph.by_fqn["blocks.0.self_attn"].fqns == ("blocks.0.self_attn", "blocks.2.self_attn")
    assert len(graph.calls_of("blocks.0.self_attn")) == 2


def test_saves_of_a_dropped_branch_do_not_count():
    class Dropping(nn.Module):
        def forward(self, x):
            x.exp()
            return x.sin()

    graph = memopt.analyze(Dropping(), torch.randn(4, requires_grad=True))
    assert [t.op for t in graph.saved] == ["Sin"]


def test_flows_lead_from_makers_to_users():
    digraph = memopt.analyze(models.llama(), models.batch(seq_length=8)).to_networkx()
    layer = "model.layers.0"
    assert digraph.edges[f"{layer}.input_layernorm", f"{layer}.self_attn.q_proj"]["kind"] == "flows"
    assert digraph.edges[f"{layer}.self_attn", f"{layer}.self_attn.o_proj"] == {
        "kind": "contains",
        "names": ("o_proj",),
        "flows": True,
    }
    assert digraph.edges[f"{layer}.mlp.act_fn", f"{layer}.mlp"]["kind"] == "flows"


@pytest.mark.parametrize(
    ("dtype", "masked", "kernel"),
    [
        ("bfloat16", False, "Flash"),
        ("bfloat16", True, "Efficient"),
        ("float32", True, "Efficient"),
        ("float32", False, None),
    ],
)
def test_a_gpu_kernel_is_planned_for_without_a_gpu(dtype, masked, kernel):
    model = models.llama(num_key_value_heads=2).to(getattr(torch, dtype))
    inputs = models.batch(seq_length=64)
    if masked:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"]).tril_(0)
    graph = memopt.analyze(model, inputs, target_device="cuda")
    ops = {t.op for t in graph.saved if t.op.startswith("ScaledDotProduct")}
    assert ops == ({f"ScaledDotProduct{kernel}Attention"} if kernel else set())


def test_a_model_that_needs_data_is_an_error_with_a_way_out():
    class Peeking(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return x * self.inner(x).sum().item()

    with pytest.raises(TraceError, match="asks for the values of a tensor"):
        memopt.analyze(Peeking(), torch.randn(2, 4))


class Guarded(nn.Module):
    """Branches of an ordinary run: guards against bad numbers, chance, and lengths read off the inputs."""

    def __init__(self):
        super().__init__()
        self.layer, self.dropped = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, lengths):
        if torch.isnan(x).any() or torch.isinf(x).any() or not torch.isfinite(x).all():
            raise ValueError("bad numbers")
        if torch.rand([]) < 0.1:
            return self.dropped(x)
        longest = int(lengths.max())
        rows = torch.nonzero(lengths > 1).flatten()
        mask = torch.zeros(x.shape[0], dtype=torch.bool)
        mask[rows] = True
        return self.layer(x[: lengths.tolist()[0]]).tanh() * longest if mask.any() else x


def test_branches_on_values_of_the_inputs_are_the_real_ones():
    graph = memopt.analyze(Guarded(), {"x": torch.randn(4, 8), "lengths": torch.tensor([3, 1, 2, 2])})
    assert [(t.owner, t.op, t.shape[0]) for t in graph.saved] == [("layer", "Addmm", 3), ("", "Tanh", 3)]


def test_a_forgotten_value_is_not_a_wrong_one():
    class Overwriting(nn.Module):
        def forward(self, x, flags):
            flags = flags.clone()
            flags[0] = x.sum() > 0
            return x.exp() if flags.all() else x

    with pytest.raises(TraceError, match="asks for the values"):
        memopt.analyze(
            Overwriting(), {"x": torch.randn(4, requires_grad=True), "flags": torch.ones(3, dtype=torch.bool)}
        )


def test_chance_is_not_moved():
    model, inputs = Guarded(), {"x": torch.randn(4, 8), "lengths": torch.tensor([3, 1, 2, 2])}
    before = torch.get_rng_state()
    memopt.analyze(model, inputs)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_compiled_model_is_refused_and_a_compiled_part_is_traced_as_it_was_written():
    model, inputs = models.llama(num_hidden_layers=1), models.batch(seq_length=8)
    plain = memopt.analyze(model, inputs)
    with pytest.raises(GraphCompileError, match="LlamaForCausalLM"):
        memopt.analyze(torch.compile(model, backend="eager"), inputs)
    model.model.layers[0].mlp.compile(backend="eager")
    assert memopt.analyze(model, inputs).saved == plain.saved
    assert model.model.layers[0].mlp._compiled_call_impl is not None


def test_a_batch_that_fits_no_memory_costs_none():
    graph = memopt.analyze(preset("tiny-llama"), batch_size=4096, seq_length=4096, dtype="float32")
    assert graph.input.batch_size == 4096
    assert memopt.ir.saved_bytes(graph.saved).activation_bytes > 1 << 40


def test_wrong_requests_name_the_legal_values():
    model = nn.Linear(4, 4)
    with pytest.raises(IllegalValueError, match="autocast='int8'.*none, bfloat16, float16"):
        memopt.analyze(model, torch.randn(2, 4), autocast="int8")
    with pytest.raises(RequestError, match="takes no input_ids"):
        memopt.analyze(model)


def test_a_rewritten_model_is_traced_as_the_model_it_was():
    model, inputs = models.llama(), models.batch(seq_length=512)
    before = memopt.analyze(model, inputs)
    memopt.apply(model, {"activation_swap": "attention"}, inputs)
    assert memopt.analyze(model, inputs) == before
