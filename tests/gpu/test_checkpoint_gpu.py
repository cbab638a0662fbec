"""Checkpointing on a real device: exact with its kernels and random numbers, and freed to the byte that is planned.

What does not measure the device's memory is rehearsed on the CPU, so that no case is met there for the first time.
"""

import contextlib
import gc

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import memopt
from memopt.ir import account
from tests import models, zoo
from tests.gpu.devices import batch, moved
from tests.runtime.steps import assert_equal_gradients, gradients

MODES = ("full", "selective", "attention-only")
NUM_STEPS = 5
"""The first two teach a region what the others use."""
SIZED = {"hidden_size": 1024, "head_dim": 128, "num_attention_heads": 8, "num_hidden_layers": 4}
"""Of models whose activations outweigh what an allocator rounds up."""


KERNELS = ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")


def checkpointed(model, mode, inputs, *, autocast="none"):
    plan = memopt.plan(memopt.analyze(model, inputs, autocast=autocast), passes=f"activation-checkpoint:mode={mode}")
    return memopt.apply(model, plan)


def random_states(device):
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def step(model, inputs, seed, context):
    """Return the loss, the gradients, and the random streams after forward and after backward."""
    model.zero_grad()
    torch.manual_seed(seed)
    device = next(model.parameters()).device
    with context():
        loss = model(**inputs).loss
    after_forward = random_states(device)
    loss.backward()
    return loss.detach(), gradients(model), [*after_forward, *random_states(device)]


def assert_equal(want, got):
    assert torch.equal(want[0], got[0])
    assert_equal_gradients(want[1], got[1])
    assert all(map(torch.equal, want[2], got[2]))


def assert_exact(build, inputs, mode, *, dtype=torch.float32, autocast="none", **options):
    """Some steps beside the model as it was."""
    device = inputs["input_ids"].device
    plain, again, model = (build(**options).to(device, dtype) for _ in range(3))
    handle = checkpointed(model, mode, inputs, autocast=autocast)

    def context():
        return contextlib.nullcontext() if autocast == "none" else torch.autocast(device.type, torch.bfloat16)

    for seed in range(NUM_STEPS):
        want = step(plain, inputs, seed, context)
        assert_equal(want, step(again, inputs, seed, context))  # the kernels repeat themselves
        assert_equal(want, step(model, inputs, seed, context))
    stats, totals = handle.stats(), account(handle.plan)
    assert stats.checkpointed_calls == stats.replayed_calls == NUM_STEPS * len(handle.plan.decisions)
    if device.type == "cpu":  # which attention kernel a GPU takes, and what that saves, the trace knows roughly only
        assert stats.kept_results_bytes == NUM_STEPS * totals.result_bytes
        assert (totals.result_bytes > 0) == (mode != "full" and not options.get("attention_dropout"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("build", [models.qwen3_moe, models.llama])
def test_exact(device, build, dtype, mode):
    assert_exact(build, batch(device), mode, dtype=dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exact_with_dropout_in_attention(device, dtype, mode):
    """The device's random stream is rewound for a replay, and goes on as if there had been none."""
    device_inputs = batch(device)
    plain, model = (models.llama(attention_dropout=0.2).to(device, dtype) for _ in range(2))
    handle = checkpointed(model, mode, device_inputs)
    for seed in range(NUM_STEPS):
        want = step(plain, device_inputs, seed, contextlib.nullcontext)
        assert_equal(want, step(model, device_inputs, seed, contextlib.nullcontext))
    other = step(plain, device_inputs, 7, contextlib.nullcontext)
    assert not torch.equal(want[0], other[0])  # it does draw
    assert handle.stats().replayed_calls == NUM_STEPS * 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("build", [models.qwen3_moe, models.llama])
def test_exact_under_autocast(device, build, mode):
    assert_exact(build, batch(device), mode, autocast="bfloat16")


@pytest.mark.parametrize("mode", MODES)
def test_exact_with_padding(device, mode):
    inputs = batch(device)
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, :10] = 0
    assert_exact(models.llama, inputs | {"attention_mask": mask}, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("seq_length", [77, 200])
def test_exact_with_each_kernel_of_attention(device, seq_length, backend, mode, monkeypatch):
    """Kernels pad what they save and leave some of it unset: a replay that differs there is not taken for another."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    if device.type == "cpu" and backend not in ("MATH", "FLASH_ATTENTION"):
        pytest.skip("a CPU has no such kernel")
    inputs = batch(device, seq_length=seq_length)
    plain, model = (models.llama().to(device, torch.bfloat16) for _ in range(2))
    checkpointed(model, mode, inputs)
    for seed in range(NUM_STEPS):
        with sdpa_kernel([SDPBackend.__members__[backend], SDPBackend.MATH], set_priority=True):
            want, got = (step(one, inputs, seed, contextlib.nullcontext) for one in (plain, model))
        assert_equal(want, got)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_no_model_is_taken_for_one_that_cannot_be_replayed(name, mode):
    """Their kernels need not repeat themselves to the bit: the proof of the first replays allows for that."""
    torch.use_deterministic_algorithms(False)
    device = torch.device("cuda")
    model, inputs = zoo.ZOO[name]().to(device), moved(zoo.batch(name, use_cache=False), device)
    traced = {k: v for k, v in inputs.items() if name != "wav2vec2_conformer" or k != "labels"}
    if name == "qwen2_5_vl":
        traced["position_ids"] = torch.arange(zoo.SEQ_LENGTH, device=device).expand(3, zoo.BATCH_SIZE, -1)
    handle = memopt.apply(model, memopt.plan(memopt.analyze(model, traced), activation_checkpoint=mode))
    losses = []
    for _ in range(3):
        losses.append(zoo.train_step(model, inputs)["loss"].item())
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-3)
    assert handle.stats().replayed_calls == handle.stats().checkpointed_calls > 0


@pytest.mark.parametrize("mode", MODES)
def test_several_forwards_before_one_backward(device, mode):
    """Replays of the later call come first, each with its own arguments and random numbers."""
    plain, model = (models.llama(attention_dropout=0.2).to(device) for _ in range(2))
    checkpointed(model, mode, batch(device))
    for _ in range(2):
        for one in (plain, model):
            one.zero_grad()
            torch.manual_seed(3)
            losses = [one(**batch(device, seed=seed)).loss for seed in range(3)]
            (losses[1] + losses[0] * losses[2]).backward()
        assert_equal_gradients(gradients(plain), gradients(model))


@pytest.mark.parametrize("mode", MODES)
def test_on_a_stream_of_its_own(mode):
    """A replay runs where the forward ran, whatever stream is current when backward is called."""
    device = torch.device("cuda")
    plain, model = (models.llama().to(device) for _ in range(2))
    inputs = batch(device)
    checkpointed(model, mode, inputs)
    stream = torch.cuda.Stream()
    for seed in range(3):
        want = step(plain, inputs, seed, contextlib.nullcontext)
        torch.cuda.synchronize()
        model.zero_grad()
        with torch.cuda.stream(stream):
            loss = model(**inputs).loss
        torch.cuda.current_stream().wait_stream(stream)
        loss.backward()
        torch.cuda.synchronize()
        assert torch.equal(want[0], loss.detach())
        assert_equal_gradients(want[1], gradients(model))


def allocated_after_forward(model, inputs):
    loss = model(**inputs).loss
    torch.cuda.synchronize()
    gc.collect()
    allocated = torch.cuda.memory_allocated()
    loss.backward()
    model.zero_grad()
    return allocated


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("build", [models.qwen3_moe, models.llama])
def test_what_the_plan_says_is_freed_is_freed(build, dtype, mode):
    device = torch.device("cuda")
    model = build(**SIZED, num_key_value_heads=8, intermediate_size=4096).to(device, dtype)
    inputs = batch(device, seq_length=1024)
    before = [allocated_after_forward(model, inputs) for _ in range(3)][-1]
    handle = checkpointed(model, mode, inputs)
    after = [allocated_after_forward(model, inputs) for _ in range(3)][-1]
    freed = account(handle.plan).net_freed_bytes
    assert freed > 64 << 20
    assert abs((before - after) - freed) <= max(0.02 * freed, 20 << 20)


@pytest.mark.parametrize("mode", MODES)
def test_the_peak_of_a_step_falls(mode):
    device = torch.device("cuda")
    model = models.llama(**SIZED, num_key_value_heads=8, intermediate_size=4096).to(device, torch.bfloat16)
    inputs = batch(device, seq_length=1024, batch_size=4)

    def peak():
        for _ in range(3):
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            model(**inputs).loss.backward()
        return torch.cuda.max_memory_allocated()

    before = peak()
    checkpointed(model, mode, inputs)
    assert peak() < before


@pytest.mark.parametrize("mode", MODES)
def test_the_steady_state_takes_no_more_memory(mode):
    device = torch.device("cuda")
    model = models.qwen3_moe(attention_dropout=0.1).to(device)
    inputs = batch(device)
    handle = checkpointed(model, mode, inputs)
    marks = []
    for number in range(20):
        step(model, inputs, number, contextlib.nullcontext)
        torch.cuda.synchronize()
        marks.append(torch.cuda.memory_allocated())
    assert len(set(marks[3:])) == 1
    assert handle.stats().replayed_calls == 20 * 3
