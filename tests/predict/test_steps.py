"""A step on fake tensors takes, operator by operator, the bytes that a real one takes."""

import pytest
import torch

import memopt
from memopt.ir import DEVICES, Use, account, policy
from tests import zoo
from tests.predict.steps import predicted, real_totals
from tests.runtime.offloads import PARADIGM

SWAP = {"activation_swap": "attention"}
CONFIGS = {
    "nothing": None,
    "full": {"activation_checkpoint": "full"},
    "selective": {"activation_checkpoint": "selective"},
    "swap": SWAP,
    "paradigm": PARADIGM,
}


@pytest.mark.parametrize("ends_at_once", [True, False])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt2", "t5"])
def test_alive_after_each_operator_is_what_a_real_step_has(name, config, ends_at_once, monkeypatch):
    monkeypatch.setattr(policy, "MIN_SWAP_TENSOR_BYTES", 1)
    config = CONFIGS[config]
    if config is SWAP and name in ("gpt2", "t5"):
        pytest.skip("has no self_attn")
    plain, inputs = zoo.ZOO[name](), zoo.batch(name, use_cache=False)
    plan = memopt.plan(memopt.analyze(plain, inputs), config) if config else None
    timeline, _, _ = predicted(plain, inputs, plan, ends_at_once=ends_at_once, num_forwards=2)
    if plan:
        memopt.apply(plain, plan)
    assert timeline.totals == real_totals(plain, inputs, ends_at_once=ends_at_once)
    peak = timeline.step(DEVICES["h200"].without_libraries()).peak
    assert peak.total_bytes == sum(peak.uses) == max(timeline.totals)


def test_what_is_copied_is_what_the_plan_says(monkeypatch):
    monkeypatch.setattr(policy, "MIN_SWAP_TENSOR_BYTES", 1)
    plain, inputs = zoo.ZOO["llama"](), zoo.batch("llama", use_cache=False)
    plan = memopt.plan(memopt.analyze(plain, inputs), SWAP)
    _, engine, handle = predicted(plain, inputs, plan, ends_at_once=True)
    assert handle.stats().copied_out_bytes == account(plan).swap_bytes > 0
    engine.finish()
    assert engine.pool.in_use_bytes == 0


def test_the_peak_is_found_in_the_module_or_the_node_that_made_it():
    plain, inputs = zoo.ZOO["llama"](), zoo.batch("llama", use_cache=False)
    timeline, _, _ = predicted(plain, inputs, None, ends_at_once=True)
    step = timeline.step(DEVICES["h200"])
    places = {(moment.module, moment.op) for moment in step.moments}
    assert ("model.layers.1.mlp.down_proj", "aten.mm") in places
    assert ("model.layers.1.mlp.down_proj", "MmBackward0 aten.mm") in places
    largest = [p.untyped_storage().nbytes() for p in (*plain.parameters(), *plain.buffers())]
    assert step.peak.bytes_for(Use.PARAMETERS) == sum(-(-num_bytes // 512) * 512 for num_bytes in largest)
    assert step.peak.bytes_for(Use.ACTIVATIONS) > 0


@pytest.mark.parametrize("config", ["nothing", "full"])
def test_a_model_that_keeps_a_part_of_its_graph_is_predicted_after_a_backward(config):
    torch.manual_seed(0)
    plain, inputs = Remembering(), {"hidden_states": torch.randn(4, 64, requires_grad=True)}
    plan = memopt.plan(memopt.analyze(plain, inputs), CONFIGS[config]) if CONFIGS[config] else None
    timeline, _, _ = predicted(plain, inputs, plan, ends_at_once=True, num_forwards=2)
    if plan:
        memopt.apply(plain, plan)
    assert timeline.totals == real_totals(plain, inputs, ends_at_once=True)


class Remembering(torch.nn.Module):
    """Keeps what it computed, with its graph, until the next forward, as recurrent layers do."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(64, 2, 64, 0.0) for _ in range(2))
        self.state = None

    def forward(self, hidden_states):
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        self.state = hidden_states.exp()
        return (hidden_states.tanh() + self.state).sum()
