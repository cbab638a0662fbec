"""Real steps whose storages are counted, and predicted ones of the same models."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import memopt
from memopt.analyze.fake_run import fake_run
from memopt.ir import Use
from memopt.predict.backend import FakeBackend
from memopt.predict.live import LiveBytes
from memopt.predict.mode import CountingMode
from memopt.predict.step import FakeSteps, loss_of, run_backward
from memopt.runtime import engine as engine_module
from memopt.runtime.engine import Engine

CPU = torch.device("cpu")
RANDOM_STATE = torch.get_rng_state().shape
"""A replay looks at it: a tensor that is on the host in a run on any device."""
FAKE = {"batch_size": 1, "seq_length": 1, "dtype": "float32", "autocast": "none", "attn_implementation": "sdpa"}


class Counting(TorchDispatchMode):
    """Count what real operators make, as the fake mode does."""

    def __init__(self, model, inputs, host):
        super().__init__()
        self.live, self.totals, self._host = LiveBytes(), [], host
        for tensor in (*model.parameters(), *model.buffers(), *inputs):
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
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(engine_module._ENGINES, CPU, Engine(backend))
        with Counting(model, tensors, backend.host) as counting:  # of all steps: a model may keep what one of them made
            for _ in range(num_steps):
                counting.totals.clear()
                run_backward(loss_of(model(**inputs)))  # modes that are on go on
                model.zero_grad()
    return counting.totals


def predicted(plain, inputs, plan, *, ends_at_once, num_forwards=0):
    run = fake_run(plain, inputs, CountingMode(), **FAKE, target_device="cpu")
    steps = FakeSteps(run)
    handle = memopt.apply(run.twin, plan) if plan else None
    timeline, engine = steps.step(ends_at_once=ends_at_once, num_forwards=num_forwards)
    return timeline, engine, handle
