"""What module calls return, and the calls of the experts' activation, which is a method and no module."""

import pytest
import torch
from torch import nn

import memopt
from memopt.analyze.observation import Observation
from memopt.analyze.observe import observe
from memopt.ir import plan_from_json, plan_to_json
from memopt.ir.plan import Plan
from tests import zoo

EXPERTS = "model.layers.0.mlp.experts"
ITEM = 4


def traced(name, **options):
    return memopt.analyze(zoo.ZOO[name](**options), zoo.batch(name), target_device="cpu")


def of_layer(graph, region="moe_act", fqn=EXPERTS):
    return [part for part in graph.parts if part.region == region and graph.calls[part.call].fqn == fqn]


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "glm4_moe"])
@pytest.mark.parametrize("experts_implementation", ["grouped_mm", "batched_mm"])
def test_the_activation_of_fused_experts_is_a_part(name, experts_implementation):
    graph = traced(name, experts_implementation=experts_implementation)
    last = "model.layers.1.mlp.experts"
    (part,) = of_layer(graph, fqn=last)
    (call,) = graph.calls_of(last)
    assert call.first_save < part.first_save < part.end_save < call.end_save
    ((gate_up, gate_up_bytes),), ((gated, gated_bytes),) = part.inputs, part.outputs
    assert gate_up_bytes == 2 * gated_bytes
    saved = graph.saved[part.first_save : part.end_save]
    assert all(tensor.owner in (last, f"{last}.act_fn") for tensor in saved)
    assert gate_up in {tensor.storage for tensor in saved}
    product = next(tensor for tensor in graph.saved[part.end_save :] if tensor.storage == gated)
    assert (product.owner, product.storage_bytes) == (last, gated_bytes)


def test_the_eager_experts_of_gpt_oss_call_it_for_each_expert():
    model = zoo.ZOO["gpt_oss"](experts_implementation="eager")
    seen = observe(model, (), zoo.batch("gpt_oss"))
    tokens = [sum(part.outputs.values()) for part in seen.parts if seen.calls[part.call].fqn == EXPERTS]
    chosen = zoo.BATCH_SIZE * zoo.SEQ_LENGTH * 2
    assert len(tokens) > 1
    assert sum(tokens) == chosen * 48 * ITEM


def test_experts_that_do_not_call_it_have_no_part():
    model = zoo.ZOO["qwen3_moe"](experts_implementation="eager")
    assert observe(model, (), zoo.batch("qwen3_moe")).parts == []


def test_a_dense_model_has_no_parts():
    assert traced("llama").parts == ()


def test_what_a_module_returns_is_what_the_next_is_given():
    graph = traced("llama")
    (norm,), (query,), (layer,), (following,) = (
        graph.calls_of(f"model.layers.{path}") for path in ("0.input_layernorm", "0.self_attn.q_proj", "0", "1")
    )
    hidden = zoo.BATCH_SIZE * zoo.SEQ_LENGTH * 32 * ITEM
    assert norm.outputs == query.inputs
    assert [size for _, size in norm.outputs] == [hidden]
    assert layer.outputs[0] == following.inputs[0]


def test_parameters_are_no_outputs():
    seen = observe(Tied(), (torch.randn(2, 4),), {})
    assert [list(call.outputs.values()) for call in seen.calls] == [[2 * 4 * ITEM]]


def test_the_facts_survive_a_file():
    plan = Plan(graph=traced("qwen3_moe"))
    assert plan_from_json(plan_to_json(plan)) == plan


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return x @ self.weight, self.weight


class Gated(nn.Module):
    """Experts in outline."""

    fails = False

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)

    def _apply_gate(self, x):
        if self.fails:
            raise ZeroDivisionError
        gate, up = x.chunk(2, -1)
        return gate.sigmoid() * up

    def forward(self, x):
        return self._apply_gate(self.up(x))


class Wasteful(nn.Module):
    """Saves something whose graph is dropped before the end."""

    def __init__(self):
        super().__init__()
        self.experts = Gated()

    def forward(self, x):
        self.experts.up(x).exp()
        return self.experts(x).exp()


def test_the_saves_of_a_part_are_counted_without_those_that_were_dropped():
    graph = memopt.analyze(Wasteful(), torch.randn(2, 4))
    (part,) = graph.parts
    assert [tensor.op for tensor in graph.saved[part.first_save : part.end_save]] == ["Sigmoid", "Mul", "Mul"]
    assert graph.calls[part.call].fqn == "experts"
    assert part.outputs == graph.calls_of("experts")[-1].outputs


def test_nothing_is_left_on_the_module():
    module = Gated()
    before = dict(vars(module))
    seen = observe(module, (torch.randn(2, 4),), {})
    assert [part.region for part in seen.parts] == ["moe_act"]
    assert vars(module) == before
    assert "_apply_gate" not in vars(module)


def test_nothing_is_left_when_the_forward_raises():
    module, seen = Gated(), Observation()
    module.fails = True
    with pytest.raises(ZeroDivisionError):
        observe(module, (torch.randn(2, 4),), {}, seen=seen)
    assert seen.parts == []
    assert "_apply_gate" not in vars(module)
    assert not module._forward_hooks


def test_a_method_of_the_instance_is_called_and_given_back():
    module = Gated()

    def own(x):
        return x.relu()

    module._apply_gate = own
    seen = observe(module, (torch.randn(2, 4),), {})
    ((_, size),) = seen.parts[0].outputs.items()
    assert size == 2 * 8 * ITEM
    assert module._apply_gate is own


def test_a_child_of_that_name_is_a_module_and_no_part():
    model = nn.Sequential(nn.Linear(4, 8))
    model.add_module("_apply_gate", nn.ReLU())
    seen = observe(model, (torch.randn(2, 4),), {})
    assert seen.parts == []
    assert [call.fqn for call in seen.calls] == ["", "0", "_apply_gate"]
