"""The engine on a real device: exact, really freed, and safe whatever the streams do."""

import contextlib
import gc

import pytest
import torch

import memopt
from memopt.analyze.build import build_graph
from memopt.analyze.observe import observe
from memopt.analyze.roles import name_saves
from memopt.ir import account
from memopt.runtime import engine as engine_module
from memopt.runtime.backends import AcceleratorBackend
from memopt.runtime.engine import Engine, engine_of
from tests import models
from tests.runtime.steps import SWAP, assert_equal_gradients, assert_equal_steps, step

CUDA = torch.device("cuda", 0)
SLEEP_CYCLES = 20_000_000  # about 10 ms


def on_gpu(thing):
    if isinstance(thing, dict):
        return {key: on_gpu(value) for key, value in thing.items()}
    return thing.to(CUDA) if isinstance(thing, (torch.Tensor, torch.nn.Module)) else thing


def pair(build, **options):
    return on_gpu(build(**options)), on_gpu(build(**options))


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [models.qwen3_moe, models.llama])
def test_exact_with_counters_as_planned(build, dtype):
    plain, model = (m.to(dtype) for m in pair(build))
    inputs = on_gpu(models.batch(seq_length=1024))
    plan = memopt.plan(memopt.analyze(model, inputs), **SWAP)
    handle = memopt.apply(model, plan)
    assert_equal_steps(plain, model, inputs)
    assert account(plan).swap_bytes > 0
    assert handle.stats().copied_out_bytes == handle.stats().copied_in_bytes == 2 * account(plan).swap_bytes


@pytest.mark.parametrize("case", ["plain", "masked", "dropout", "float32", "gqa float32"])
def test_the_trace_without_a_gpu_lists_what_a_gpu_saves(case):
    """Also the fake CUDA trace of a live CUDA model."""
    options = {"attention_dropout": 0.1} if case == "dropout" else {}
    options |= {"num_key_value_heads": 2} if case == "gqa float32" else {}
    model = models.llama(**options).to(torch.float32 if "float32" in case else torch.bfloat16)
    inputs = models.batch(seq_length=128)
    if case == "masked":
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][0, :30] = 0
    without = memopt.analyze(model, inputs, target_device="cuda")
    model, inputs = on_gpu(model), on_gpu(inputs)
    live = memopt.analyze(model, inputs)
    seen = observe(model, (), inputs)
    name_saves(seen)
    real = build_graph(model, seen, name="real", trace_input=live.input)
    assert large(live) == large(real)
    assert large(without) == large(real)
    assert len(large(real)) > 20


def large(graph):
    return sorted(essence(t) for t in graph.saved if t.storage_bytes >= 1 << 15)


def essence(tensor):
    """Return what a save is, whichever of the SDPA kernels made it: torch prefers another one on each GPU."""
    node = "ScaledDotProduct" if tensor.node.startswith("ScaledDotProduct") else tensor.node
    is_mask = tensor.field in ("attn_bias", "attn_mask")
    field, shape = ("mask", ()) if is_mask else (tensor.field, tensor.shape)  # expanded over the heads or not
    return tensor.owner, node, field, shape, tensor.dtype, tensor.storage_bytes, tensor.kind


def allocated_after_forward(model, inputs):
    loss = model(**inputs).loss
    for engine in engine_module._ENGINES.values():
        engine.finish()
    torch.cuda.synchronize()
    gc.collect()
    allocated = torch.cuda.memory_allocated()
    loss.backward()
    model.zero_grad()
    return allocated


def test_what_the_plan_says_is_freed_is_freed():
    model = on_gpu(
        models.llama(hidden_size=1024, head_dim=128, num_attention_heads=8, num_key_value_heads=8)
    ).bfloat16()
    inputs = on_gpu(models.batch(seq_length=2048))
    before = [allocated_after_forward(model, inputs) for _ in range(2)][-1]
    handle = memopt.apply(model, SWAP, inputs)
    after = [allocated_after_forward(model, inputs) for _ in range(2)][-1]
    freed = account(handle.plan).freed_bytes
    assert freed > 64 << 20
    assert abs((before - after) - freed) <= max(0.02 * freed, 20 << 20)


class Sleepy(AcceleratorBackend):
    """A backend whose copies are late, and whose targets hold NaN until they end."""

    def copy_out(self, copies):
        with self._out:
            torch.cuda._sleep(SLEEP_CYCLES)
        return super().copy_out(copies)

    def copy_in(self, copies, after):
        for _, target in copies:
            target.fill_(0xFF)
        with self._in:
            torch.cuda._sleep(SLEEP_CYCLES)
        return super().copy_in(copies, after)


@contextlib.contextmanager
def engine(backend, **options):
    made = Engine(backend, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(engine_module._ENGINES, CUDA, made)
        yield made
        gc.collect()
        torch.cuda.synchronize()
        made.finish()
        assert made.pool.in_use_bytes == 0


@pytest.mark.parametrize("in_flight_bytes", [0, 1 << 30])
@pytest.mark.parametrize("side_stream", [False, True])
@pytest.mark.parametrize("late_compute", [False, True])
def test_late_copies_late_compute_side_streams_and_poison(in_flight_bytes, side_stream, late_compute):
    plain, model = pair(models.qwen3_moe)
    inputs = on_gpu(models.batch())
    memopt.apply(model, SWAP, inputs)
    if late_compute:
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(lambda *args: torch.cuda._sleep(SLEEP_CYCLES))
            layer.mlp.register_full_backward_pre_hook(lambda *args: torch.cuda._sleep(SLEEP_CYCLES))
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    with engine(Sleepy(CUDA), in_flight_bytes=in_flight_bytes):
        for _ in range(3):
            poison_free_blocks()
            _, grads = step(plain, inputs)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                poison_free_blocks()
                _, other = step(model, inputs)
            torch.cuda.synchronize()
            assert_equal_gradients(grads, other)


def poison_free_blocks():
    """Fill what the allocator would hand out next with NaN."""
    blocks = [torch.empty(1 << 20, dtype=torch.uint8, device=CUDA).fill_(0xFF) for _ in range(64)]
    del blocks


def test_dropped_graphs_with_copies_under_way():
    plain, model = pair(models.llama)
    inputs = on_gpu(models.batch())
    memopt.apply(model, SWAP, inputs)
    with engine(Sleepy(CUDA), in_flight_bytes=1 << 30):
        for _ in range(3):
            model(**inputs)
            poison_free_blocks()
            assert_equal_steps(plain, model, inputs, steps=1)


def test_microbatches_and_accumulation():
    plain, model = pair(models.llama)
    memopt.apply(model, SWAP, on_gpu(models.batch()))
    with engine(Sleepy(CUDA), in_flight_bytes=0):
        for one in (plain, model):
            losses = [one(**on_gpu(models.batch(seed=seed))).loss for seed in range(3)]
            for index in (1, 0, 2):
                losses[index].backward()
        torch.cuda.synchronize()
        grads, other = ({n: p.grad for n, p in m.named_parameters()} for m in (plain, model))
        assert_equal_gradients(grads, other)
        del losses


@pytest.mark.usefixtures("strict")
def test_autocast_and_grad_scaler():
    plain, model = pair(models.llama)
    inputs = on_gpu(models.batch(seq_length=2048))
    handle = memopt.apply(model, SWAP)
    results = []
    for one in (plain, model):
        scaler = torch.amp.GradScaler("cuda")
        optimizer = torch.optim.SGD(one.parameters(), lr=1e-2)
        for _ in range(3):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = one(**inputs).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append({name: p.detach() for name, p in one.named_parameters()})
    assert_equal_gradients(*results)
    assert handle.stats().copied_out_tensors > 0


def test_the_steady_state_takes_no_more_memory():
    model = on_gpu(models.llama())
    inputs = on_gpu(models.batch())
    memopt.apply(model, SWAP, inputs)
    marks = []
    for number in range(30):
        step(model, inputs)
        torch.cuda.synchronize()
        if number in (5, 29):
            engine_of(CUDA).finish()
            marks.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), engine_of(CUDA).pool.held_bytes))
    assert marks[0] == marks[1]
