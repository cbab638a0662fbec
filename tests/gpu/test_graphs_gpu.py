"""CUDA graphs over a rewritten model: a whole iteration, and only the attention of each layer."""

import copy
import gc

import pytest
import torch

import memopt
from memopt.errors import GraphCaptureError
from memopt.runtime.engine import engine_of
from tests.runtime.layers import Model
from tests.runtime.steps import assert_equal_gradients, gradients

CUDA = torch.device("cuda", 0)
WIDTH = 256
OFFLOAD = {"modules": ["core_attn", "attn_proj", "mlp_fc2"], "min_tensor_elements": 1, "margin": 0}


def pair(config):
    plain = Model(WIDTH, num_layers=4).to(CUDA, torch.bfloat16)
    model = copy.deepcopy(plain)
    return plain, model, memopt.apply(model, memopt.plan(memopt.analyze(plain, hidden()), **config))


def hidden(seed=0):
    generator = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(2, 256, WIDTH, device=CUDA, dtype=torch.bfloat16, generator=generator)


def warmed_up(model, x, steps=4):
    """Run some steps on a side stream, as torch asks for before a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(steps):
            model.zero_grad()
            model(x).backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad()
    gc.collect()


@pytest.mark.parametrize("max_inflight", [0, 1])
@pytest.mark.parametrize("recompute", [{}, {"recompute": {"modules": ["layernorm"]}}], ids=["offload", "recompute too"])
def test_a_whole_iteration_is_captured_and_runs_again_with_other_data(max_inflight, recompute):
    plain, model, handle = pair({"activation_offload": OFFLOAD | {"max_inflight": max_inflight}} | recompute)
    x = hidden()
    warmed_up(model, x)
    graph = torch.cuda.CUDAGraph()
    before = handle.stats().copied_out_tensors
    with torch.cuda.graph(graph):
        loss = model(x)
        loss.backward()
    assert handle.stats().copied_out_tensors > before
    for seed in range(1, 5):
        x.copy_(hidden(seed))
        graph.replay()
        torch.cuda.synchronize()
        plain.zero_grad()
        expected = plain(hidden(seed))
        expected.backward()
        assert torch.equal(loss, expected)
        assert_equal_gradients(gradients(plain), gradients(model))


def test_steps_beside_a_graph_do_not_touch_its_host_memory():
    plain, model, _ = pair({"activation_offload": OFFLOAD | {"max_inflight": 1}})
    x = hidden()
    warmed_up(model, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).backward()
    captured = gradients(model)
    other = copy.deepcopy(model)
    for seed in range(1, 4):
        x.copy_(hidden(seed))
        graph.replay()
        other.zero_grad()
        other(hidden(seed)).backward()
        torch.cuda.synchronize()
        plain.zero_grad()
        plain(hidden(seed)).backward()
        assert_equal_gradients(gradients(plain), captured)
        assert_equal_gradients(gradients(plain), gradients(other))


def test_a_capture_without_steps_before_it_is_a_clear_error():
    _, model, _ = pair({"activation_offload": OFFLOAD | {"max_inflight": 1}})
    x = hidden()
    warmed_up(Model(WIDTH, num_layers=4).to(CUDA, torch.bfloat16), x)
    engine = engine_of(CUDA)
    engine.finish()
    held, engine.pool._waiting, engine.pool._gaps = (engine.pool._waiting, engine.pool._gaps), {}, []
    try:
        with pytest.raises((GraphCaptureError, RuntimeError)), torch.cuda.graph(torch.cuda.CUDAGraph()):
            model(x).backward()
    finally:
        engine.pool._waiting, engine.pool._gaps = held
        torch.cuda.synchronize()


def test_graphed_attention_inside_of_layers_whose_other_parts_are_offloaded():
    plain, model, handle = pair({"activation_offload": OFFLOAD | {"modules": ["mlp_fc2", "mlp_norm"]}})
    warmed_up(model, hidden())
    for one in (plain, model):
        sample = hidden().requires_grad_()
        for layer in one.layers:
            layer.self_attn = torch.cuda.make_graphed_callables(layer.self_attn, (sample,))
    before = handle.stats().copied_out_tensors
    for seed in range(3):
        for one in (plain, model):
            one.zero_grad()
            one(hidden(seed).requires_grad_()).backward()
        assert_equal_gradients(gradients(plain), gradients(model))
    assert handle.stats().copied_out_tensors > before
