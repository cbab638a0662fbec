"""A step on fake tensors takes, operator by operator, the bytes that a real one takes."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import memopt
from memopt.analyze.fake_run import fake_run
from memopt.ir import DEVICES, Use, account, policy
from memopt.predict.backend import FakeBackend
from memopt.predict.live import LiveBytes
from memopt.predict.mode import CountingMode
from memopt.predict.step import FakeSteps
from memopt.runtime import engine as engine_module
from memopt.runtime.engine import Engine
from tests import zoo
from tests.runtime.offloads import PARADIGM

CPU = torch.device("cpu")
RANDOM_STATE = torch.get_rng_state().shape
"""A replay looks at it: a tensor that is on the host in a run on any device."""
FAKE = {"batch_size": 1, "seq_length": 1, "dtype": "float32", "autocast": "none", "attn_implementation": "sdpa"}
SWAP = {"activation_swap": "attention"}
CONFIGS = {
    "nothing": None,
    "full": {"activation_checkpoint": "full"},
    "selective": {"activation_checkpoint": "selective"},
    "swap": SWAP,
    "paradigm": PARADIGM,
}


class Counting(TorchDispatchMode):
    """Count what real operators make, as the fake mode does."""

    def __init__(self, model, inputs, host):
        super().__init__()
        self.live, self.totals, self._host = LiveBytes(), [], host
        for tensor in (*model.parameters(), *model.buffers(), *inputs.values()):
            self.live.note(tensor, Use.PARAMETERS)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(t, torch.Tensor)]
        made = [t for t in made if t.untyped_storage()._cdata not in self._host and t.shape != RANDOM_STATE]
        for tensor in made:
            self.live.note(tensor, Use.WORKSPACE)
        if made:
            self.totals.append(self.live.total)
        return out


class RealCopies(FakeBackend):
    """Copy for real, at once or when somebody waits for it: in the order that a prediction takes copies to have."""

    def __init__(self, *, ends_at_once):
        super().__init__(CPU, ends_at_once=ends_at_once)
        self.host = set()

    def allocate_host(self, num_bytes):
        with _disable_current_modes():
            memory = torch.empty(num_bytes, dtype=torch.uint8)
        self.host.add(memory.untyped_storage()._cdata)
        return memory

    def copy_out(self, copies):
        _copy(copies)
        return super().copy_out(copies)

    def copy_in(self, copies, after):
        _copy(copies)
        return super().copy_in(copies, after)


def _copy(copies):
    with _disable_current_modes():
        for source, target in copies:
            target.copy_(source)


def real_totals(model, inputs, *, ends_at_once, num_steps=3):
    """Return what is alive after each operator of the last of some steps, and the engine."""
    backend = RealCopies(ends_at_once=ends_at_once)
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(engine_module._ENGINES, CPU, Engine(backend))
        for number in range(num_steps):
            last = number == num_steps - 1
            with Counting(model, tensors, backend.host) if last else contextlib.nullcontext() as counting:
                model(**inputs).loss.backward()
            model.zero_grad()
    return counting.totals


def predicted(plain, inputs, plan, *, ends_at_once, num_forwards=0):
    run = fake_run(plain, inputs, CountingMode(), **FAKE, target_device="cpu")
    steps = FakeSteps(run)
    handle = memopt.apply(run.twin, plan) if plan else None
    timeline, engine = steps.step(ends_at_once=ends_at_once, num_forwards=num_forwards)
    return timeline, engine, handle


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
