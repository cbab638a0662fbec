"""Engines that tests put in place of the CPU's own."""

import contextlib
import gc

import pytest
import torch

from memopt.ir import CheckpointPolicy
from memopt.runtime import CpuBackend
from memopt.runtime import engine as engine_module
from memopt.runtime.counters import summed
from memopt.runtime.engine import Engine
from memopt.runtime.module_state import state_of
from memopt.runtime.rewrite import is_rewritten

CPU = torch.device("cpu")


def counters_of(module):
    return state_of(module).counters


def total_stats(model):
    """Return the counters of all rewritten modules, however they were rewritten."""
    return summed(state_of(module).counters for module in model.modules() if is_rewritten(module))


def everything(tensor):
    """Swap whatever the engine allows."""
    return CheckpointPolicy.MUST_SWAP


@contextlib.contextmanager
def cpu_engine(*, cap_bytes=1 << 30, in_flight_bytes=0, **options):
    """Put a new engine in the CPU's place; in the end nothing may be left in it.

    Without bytes in flight every region's end waits for its copies, so that everything really leaves and comes back.
    """
    engine = Engine(CpuBackend(**options), cap_bytes=cap_bytes, in_flight_bytes=in_flight_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(engine_module._ENGINES, CPU, engine)
        yield engine
        assert_empty(engine)


def assert_empty(engine):
    """No block in use, no slot known, nothing on its way."""
    gc.collect()
    engine.finish()
    while engine._pending:  # a copy of a dropped slot may still run
        engine.collect()
    assert engine.pool.in_use_bytes == 0
    assert not engine.leftovers
    assert not engine._leaving
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
