"""What is wrong in the original of fine-grained offload is not wrong here; each test finds its fault put in."""

import itertools
from fractions import Fraction
from weakref import WeakKeyDictionary

import pytest
import torch

from memopt.config import load_config
from memopt.ir import account, offload_rules
from memopt.runtime import forward as forward_module
from memopt.runtime.engine import Engine
from memopt.runtime.group import Group
from memopt.runtime.handles import Swapped
from memopt.runtime.slot import State
from tests import zoo
from tests.runtime.engines import counters_of, cpu_engine
from tests.runtime.offloads import PARADIGM, assert_same_step, offload, recompute, rewritten
from tests.runtime.parts import GatedLayer, Stack, hidden, words
from tests.runtime.steps import assert_equal_gradients, gradients

ATTENTION = offload("core_attn", "attn_proj", "mlp_norm")
FAULTY = pytest.mark.parametrize("faulty", [False, True], ids=["ours", "with-the-fault"])


def slowly():
    return 0.005


def like_a_stream(engine):
    """Let the host run ahead of the copies, as beside a GPU: memory is given up while the copy out of it still runs."""
    engine.backend.wait = lambda event, target: event.wait()
    engine.backend.release_after = lambda event: None
    return engine


def found(faulty, *errors):
    """Expect a fault to show if it was put in."""
    return pytest.raises((AssertionError, *errors)) if faulty else pytest.MonkeyPatch.context()


def layers_of(name="llama", num_layers=4):
    return zoo.ZOO[name](num_hidden_layers=num_layers), zoo.batch(name)


@FAULTY
@pytest.mark.parametrize("prefetches", [True, False])
def test_a_reload_waits_for_its_own_copy_out(faulty, prefetches, monkeypatch):
    """Fault: a reload in unpack, which no prefetch came before, reads host memory that is not filled yet."""
    if not prefetches:
        monkeypatch.setattr(Group, "reach", lambda group: None)
    plain, inputs = layers_of()
    with cpu_engine(delay_s=slowly, poison=True) as engine:
        model, _ = rewritten(plain, ATTENTION, inputs)
        backend, copy_in = like_a_stream(engine).backend, engine.backend.copy_in
        if faulty:
            monkeypatch.setattr(backend, "copy_in", lambda copies, after: copy_in(copies, ()), raising=False)
        with found(faulty):
            for _ in range(2):
                assert_same_step(plain, model, inputs)


@FAULTY
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_a_handle_knows_its_own_microbatch(faulty, order, monkeypatch):
    """Fault: unpack looks a chunk up by which is current, the last begun, not by what it was packed in."""
    plain, _ = layers_of()
    batches = [words(12, seed=seed) for seed in range(3)]
    with cpu_engine(poison=True):
        model, _ = rewritten(plain, ATTENTION, batches[0])
        assert_same_step(plain, model, batches[0])
        current = look_up_the_current(monkeypatch) if faulty else {}
        with found(faulty):
            for one in (plain, model):
                one.zero_grad()
                losses = [one(**inputs).loss for inputs in batches]
                for number in order:
                    losses[number].backward()
            assert_equal_gradients(gradients(plain), gradients(model))
        del losses
        current.clear()


def look_up_the_current(monkeypatch):
    """Let every handle find its slot by layer and number, in what was packed last."""
    begin, unpack = Swapped.__init__, Swapped.unpack
    names, numbers, current = WeakKeyDictionary(), WeakKeyDictionary(), {}

    def init(handle, group, tensor, slot):
        begin(handle, group, tensor, slot)
        numbers[group] = numbers.get(group, 0) + 1
        names[handle] = group.fqn, numbers[group]
        current[names[handle]] = slot

    def unpack_current(handle):
        handle.move_to(current.get(names.get(handle), handle._slot))
        return unpack(handle)

    monkeypatch.setattr(Swapped, "__init__", init)
    monkeypatch.setattr(Swapped, "unpack", unpack_current)
    return current


def run_in_backward(layer, run):
    """Run something in the backward of what a layer's next forward gives, with copies back on their way."""

    def watch(module, args, output):
        hook.remove()
        output.register_hook(with_grad)

    def with_grad(grad):
        with torch.enable_grad():
            run()

    hook = layer.register_forward_hook(watch)


@FAULTY
def test_host_memory_is_not_used_again_before_its_copy_back_has_ended(faulty, monkeypatch):
    """Fault: a buffer goes back to the pool when its copy back is begun; the next microbatch's copy out takes it."""
    plain, inputs = layers_of()
    later = []
    if faulty:
        monkeypatch.setattr(Engine, "_load", give_back_at_once(Engine._load))
    with cpu_engine(delay_s=lambda: 0.03, poison=True):
        model, _ = rewritten(plain, ATTENTION, inputs)
        assert_same_step(plain, model, inputs)
        with found(faulty):
            for one in (plain, model):
                one.zero_grad()
                run_in_backward(one.model.layers[2], lambda one=one: later.append(one(**words(12, seed=1)).loss))
                one(**inputs).loss.backward()
                later.pop().backward()
            assert_equal_gradients(gradients(plain), gradients(model))


def give_back_at_once(load):
    def faulty(engine, slots):
        load(engine, slots)
        for slot in slots:
            engine.pool.give(slot.host)
            slot.host = None

    return faulty


@FAULTY
@pytest.mark.parametrize("mode", ["no_grad", "inference", "eval"])
def test_a_pass_without_gradients_takes_no_plan_away(faulty, mode, monkeypatch):
    """Fault: a forward-only pass is taken for the one that records; it records nothing, and later nothing moves."""
    plain, inputs = layers_of(num_layers=6)
    plain.model.embed_tokens.requires_grad_(False)  # what the first layer is called with needs no grad in either pass
    if faulty:
        monkeypatch.setattr(forward_module, "_saves_in_method", lambda: True)
    with cpu_engine(poison=True):
        model, handle = rewritten(plain, offload("core_attn", "attn_proj", fraction=0.5), inputs)
        planned = account(handle.plan).swap_bytes
        assert planned > 0
        with found(faulty and mode != "eval"):
            forward_only(model, inputs, mode)
            before = handle.stats().copied_out_bytes
            for number in range(3):
                assert_same_step(plain, model, inputs)
                assert handle.stats().copied_out_bytes - before == planned * (number + 1)
                forward_only(model, inputs, mode)
            assert before == 0


def forward_only(model, inputs, mode):
    context = torch.inference_mode() if mode == "inference" else torch.no_grad()
    model.train(mode != "eval")
    with context:
        model(**inputs)
    model.train()


@FAULTY
def test_a_fraction_of_nine_tenths_of_ten_groups_drops_one(faulty, monkeypatch, tmp_path):
    """Fault: int(10 * (1 - 0.9)) is 0. From the file of a configuration to what is copied, and for a new length too."""
    if faulty:
        monkeypatch.setattr(offload_rules, "num_dropped", lambda number, fraction: int(number * (1 - fraction)))
    path = tmp_path / "config.yaml"
    path.write_text("activation_offload: {modules: [mlp_norm], min_tensor_elements: 1, fraction: 0.9, margin: 0}")
    plain, _ = layers_of(num_layers=10)
    with cpu_engine(), found(faulty):
        model, handle = rewritten(plain, {"activation_offload": load_config(path).activation_offload}, words(12))
        assert sum(d.action == "keep" for d in handle.plan.decisions.values()) == 1
        for length in (12, 20):
            zoo.train_step(model, words(length))
            before = copied(model)
            zoo.train_step(model, words(length))
            assert [b > a for a, b in zip(before, copied(model), strict=True)] == [True] * 9 + [False]


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.3, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("number", [1, 5, 10, 20])
def test_fractions_are_exact(number, fraction):
    assert offload_rules.num_dropped(number, fraction) == number * (10 - round(10 * fraction)) // 10
    assert Fraction(str(fraction)).denominator in (5, 10)


def copied(model):
    return [counters_of(layer).copied_out_bytes for layer in model.model.layers]


@FAULTY
def test_kept_groups_bring_nothing_back_earlier(faulty, monkeypatch):
    """Fault: each group that backward is done with brings one more back, kept ones too: all is back long before."""
    if faulty:
        monkeypatch.setattr(Group, "reach", count_groups(Group.reach))
    plain, inputs = layers_of(num_layers=8)
    with cpu_engine(delay_s=lambda: 0):
        model, handle = rewritten(plain, offload("core_attn", "attn_proj", fraction=0.5), inputs)
        zoo.train_step(model, inputs)
        per_layer = account(handle.plan).swap_bytes // 4
        ahead = []
        with found(faulty):
            bytes_ahead(model, inputs, ahead)
            assert len(ahead) == 8
            assert 0 < max(ahead) <= per_layer


def bytes_ahead(model, inputs, ahead):
    """Note, when backward leaves a layer, what has come back of those before it."""
    layers = list(model.model.layers)
    before = [counters_of(layer).copied_in_bytes for layer in layers]
    hooks = []
    for number, layer in enumerate(layers):

        def note(module, args, number=number):
            args[0].register_hook(
                lambda grad: ahead.append(
                    sum(counters_of(one).copied_in_bytes for one in layers[:number]) - sum(before[:number])
                )
            )

        hooks.append(layer.register_forward_pre_hook(note))
    model(**inputs).loss.backward()
    for hook in hooks:
        hook.remove()


def count_groups(reach):
    def counting(group):
        if group._reached:
            return
        reach(group)
        before = group.previous and group.previous()
        while before and not any(slot.state is State.HOST for slot in before.slots()):
            before = before.previous and before.previous()
        if before:
            before.engine.load(before.slots(), before.counters)

    return counting


@FAULTY
@pytest.mark.parametrize("config", [ATTENTION, PARADIGM], ids=["offload", "paradigm"])
def test_a_graph_may_be_retained(faulty, config, monkeypatch):
    """Fault: unpack pops what was packed, so that a second backward finds nothing."""
    if faulty:
        monkeypatch.setattr(Swapped, "unpack", popping(Swapped.unpack))
    plain, inputs = layers_of("qwen3_moe", 2)
    with cpu_engine(poison=True):
        model, _ = rewritten(plain, config, inputs)
        with found(faulty, AttributeError):
            for _ in range(2):
                for one in (plain, model):
                    one.zero_grad()
                    loss = one(**inputs).loss
                    loss.backward(retain_graph=True)
                    loss.backward()
                assert_equal_gradients(gradients(plain), gradients(model))
        del loss


def popping(unpack):
    def once(handle):
        tensor = unpack(handle)
        handle._slot = None
        return tensor

    return once


@FAULTY
def test_all_microbatches_move_however_many(faulty, monkeypatch):
    """Fault: as many microbatches as the first step had are offloaded; more just stay, and nobody says so."""
    plain, _ = layers_of()
    with cpu_engine(poison=True):
        model, handle = rewritten(plain, ATTENTION | recompute("layernorm"), words(12))
        planned = account(handle.plan).swap_bytes
        if faulty:
            stop_after(2, len(model.model.layers), monkeypatch)
        with found(faulty):
            for number in (2, 5, 1, 3):
                before = handle.stats().copied_out_bytes
                for one in (plain, model):
                    one.zero_grad()
                    losses = [one(**words(12, seed=seed)).loss for seed in range(number)]
                    for loss in losses:
                        loss.backward()
                assert_equal_gradients(gradients(plain), gradients(model))
                assert handle.stats().copied_out_bytes - before == number * planned
        del loss, losses


def stop_after(num_microbatches, num_layers, monkeypatch):
    copy_out, calls = Engine.copy_out, itertools.count()

    def counting(engine, slots, counters, **limits):
        if next(calls) < num_microbatches * num_layers:
            copy_out(engine, slots, counters, **limits)

    monkeypatch.setattr(Engine, "copy_out", counting)


@FAULTY
@pytest.mark.parametrize("pattern", ["module:*.self_attn", "module:*.qkv_proj", "core_attn"])
def test_what_the_forward_still_uses_is_not_taken_away(faulty, pattern, monkeypatch):
    """Fault: a region's end frees its storages by force, though a view of one, the gate, is used after it."""
    plain = Stack(GatedLayer)
    if faulty:
        monkeypatch.setattr(Engine, "_settle", release_by_force(Engine._settle))
    with cpu_engine(poison=True):
        model, handle = rewritten(plain, offload(pattern), hidden())
        with found(faulty and pattern == "module:*.self_attn"):
            for seed in range(3):
                assert_same_step(plain, model, hidden(seed))
            assert handle.stats().copied_out_bytes == 3 * account(handle.plan).swap_bytes > 0


def release_by_force(settle):
    """Return what gives up the memory of all that has left, whoever else has it: here, it is written to."""

    def faulty(engine, limit_bytes, limit_groups=None):
        slots = [slot for _, _, refs in engine._leaving for ref in refs if (slot := ref())]
        storages = [slot.device.untyped_storage() for slot in slots if slot.state is State.OFFLOADING]
        for event, _, _ in engine._leaving:
            event.wait()
        settle(engine, limit_bytes, limit_groups)
        for storage in storages:
            storage.fill_(0x7F)

    return faulty
