"""What a copy still holds of the device is let go as soon as it may be, not when the next forward comes."""

import gc

import pytest
import torch

import memopt
from memopt.predict.backend import FakeBackend
from memopt.runtime import engine as engine_module
from memopt.runtime.counters import Counters
from memopt.runtime.engine import Engine
from memopt.runtime.slot import Slot
from tests import zoo
from tests.runtime.engines import CPU

SWAP = {"activation_swap": "attention"}


class LateCopies(FakeBackend):
    """Copies out that end when they are waited for."""

    def __init__(self):
        super().__init__(CPU, ends_at_once=False)
        self.events = []

    def copy_out(self, copies):
        self.events.append(super().copy_out(copies))
        return self.events[-1]


def alive(storages):
    gc.collect()
    return [not ref.expired() for ref in storages]


def test_what_stayed_and_was_used_is_let_go_in_backward():
    backend = LateCopies()
    engine = Engine(backend, cap_bytes=1 << 30)
    tensor = torch.ones(1024)
    storage = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())
    slot = Slot(engine, tensor)
    engine.copy_out([slot], Counters())
    engine.load([slot], Counters())  # it has not left: it stays
    del slot, tensor
    assert alive([storage]) == [True]  # a copy reads it
    backend.events[0].wait()
    engine.load([], Counters())
    assert alive([storage]) == [False]


@pytest.mark.parametrize("backward", [True, False])
def test_undo_leaves_nothing_of_the_last_step_on_the_device(backward, monkeypatch):
    monkeypatch.setattr("memopt.ir.policy.MIN_SWAP_TENSOR_BYTES", 1)
    engine = Engine(LateCopies(), cap_bytes=1 << 30)
    monkeypatch.setitem(engine_module._ENGINES, CPU, engine)
    model, inputs = zoo.ZOO["llama"](), zoo.batch("llama", use_cache=False)
    handle = memopt.apply(model, SWAP, inputs)
    loss = model(**inputs).loss
    if backward:
        loss.backward()
    del loss
    assert engine._leaving or engine.leftovers
    handle.undo()
    assert not engine._leaving
    assert not engine.leftovers
    assert not engine._pending
