"""When a model's forward has ended, none of its copies is under way any more."""

import copy
import gc
import pickle
import time

import pytest
import torch

import memopt
from memopt.runtime.settling import settle_copies
from tests import zoo
from tests.runtime.engines import cpu_engine

SWAP = {"activation_swap": "attention"}
OFFLOAD = {"activation_offload": {"modules": ["core_attn"], "min_tensor_elements": 1}}
DELAY_S = 0.01


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr("memopt.ir.policy.MIN_SWAP_TENSOR_BYTES", 1)


def rewritten(config=SWAP):
    model, inputs = zoo.ZOO["llama"](), zoo.batch("llama", use_cache=False)
    return model, inputs, memopt.apply(model, config, inputs)


@pytest.mark.parametrize("config", [SWAP, OFFLOAD], ids=["swap", "offload"])
def test_copies_of_late_layers_are_under_way_until_the_forward_ends(config):
    with cpu_engine(in_flight_bytes=1 << 30, delay_s=lambda: DELAY_S) as engine:
        model, inputs, _ = rewritten(config)
        model(**inputs).loss.backward()
        under_way = []
        model.lm_head.register_forward_pre_hook(lambda *_: under_way.append(len(engine._leaving)))
        loss = model(**inputs).loss
        assert under_way[0] > 0
        assert not engine._leaving
        loss.backward()


def test_without_the_call_of_the_model_copies_go_on_and_gradients_are_right():
    with cpu_engine(in_flight_bytes=1 << 30, delay_s=lambda: DELAY_S, poison=True) as engine:
        plain, inputs = zoo.ZOO["llama"](), zoo.batch("llama", use_cache=False)
        model, _, _ = rewritten()
        plain(**inputs).loss.backward()
        loss = model.forward(**inputs).loss
        assert engine._leaving
        loss.backward()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)


def test_copies_of_the_model_settle_too_and_undo_takes_the_hook_off():
    with cpu_engine():
        model, _, handle = rewritten()
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert settle_copies in other._forward_hooks.values()
            memopt.undo(other)
            assert not other._forward_hooks
        handle.undo()
        assert not model._forward_hooks


def test_a_plan_without_copies_puts_no_hook_on():
    model, _, _ = rewritten({"activation_checkpoint": "full"})
    assert not model._forward_hooks


def test_undo_of_what_was_wrapped_around_the_model_takes_the_hook_off_too():
    with cpu_engine():
        model, _, _ = rewritten()
        memopt.undo(torch.nn.Sequential(model))
        assert not model._forward_hooks


def test_the_next_forward_lets_go_of_what_a_failed_one_left():
    with cpu_engine(in_flight_bytes=1 << 30, delay_s=lambda: DELAY_S) as engine:
        model, inputs, _ = rewritten()
        model(**inputs).loss.backward()
        hook = model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**inputs)
        hook.remove()
        gc.collect()
        assert engine.leftovers
        time.sleep(20 * DELAY_S)  # the copies have ended, and nobody knows
        with torch.no_grad():
            model(**inputs)
        assert not engine._leaving
        assert not engine.leftovers
        assert engine.pool.in_use_bytes == 0


def test_applying_again_puts_no_second_hook_on():
    model, inputs, _ = rewritten()
    memopt.undo(model.model)  # does not know of the model around it
    memopt.apply(model, SWAP, inputs)
    assert [*model._forward_hooks.values()] == [settle_copies]
