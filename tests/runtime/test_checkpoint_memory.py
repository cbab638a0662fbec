"""What checkpointed regions hold: little after the forward, nothing after the backward, whatever the collector does."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import zoo
from tests.runtime.checkpoints import MODES, calls, checkpointed, checkpointed_zoo, collected, stacked


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


@pytest.fixture(autouse=True)
def no_collector():
    """Whatever dies must die by its count of references."""
    gc.collect()
    gc.freeze()  # nor need it look at all that was imported
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


class Bytes(TorchDispatchMode):
    """Follow every storage that an operator makes, in forward, backward and replay."""

    def __init__(self):
        super().__init__()
        self._live = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            if storage._cdata not in known:
                self._live[storage._cdata] = storage._weak_ref(), storage.nbytes()
        return out

    def live_bytes(self):
        """Return the bytes of the storages that were made in here and are there still."""
        self._live = {key: value for key, value in self._live.items() if not torch.UntypedStorage._expired(value[0])}
        return sum(size for _, size in self._live.values())


class PeakBytes(Bytes):
    """Count after every operator, which takes its time."""

    peak_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes())
        return out


def _storages(values):
    return [t.untyped_storage() for t in tree_leaves(values) if isinstance(t, torch.Tensor)]


class Mlp(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).sigmoid().sin()).tanh()


ROWS = torch.randn(1536, 256, generator=torch.Generator().manual_seed(0))


def stack(mode, num_layers=4):
    torch.manual_seed(0)
    layers = [Mlp() for _ in range(num_layers)]
    if mode == "off":
        return stacked("full", ROWS, *layers)[0], None
    _, model, handle = stacked(mode, ROWS, *layers)
    return model, handle


def step_bytes(model):
    """Return the bytes that one step holds after its forward, at its peak, and after its backward but for gradients."""
    model.zero_grad()
    with PeakBytes() as measured:
        loss = model(ROWS).square().mean()
        after_forward = measured.live_bytes()
        loss.backward()
        grads = sum(p.grad.nbytes for p in model.parameters())
        after_backward = measured.live_bytes() - grads - loss.nbytes
    return after_forward, measured.peak_bytes, after_backward


def test_less_is_held_and_nothing_in_the_end():
    held, peak = {}, {}
    for mode in ("off", *MODES):
        model, handle = stack(mode)
        for _ in range(3):  # the first call learns
            kept_before = handle.stats().kept_results_bytes if handle else 0
            held[mode], peak[mode], left = step_bytes(model)
            assert left == 0
        if mode == "selective":
            kept = handle.stats().kept_results_bytes - kept_before
            assert held[mode] - held["full"] == kept > 0
    assert held["full"] < held["selective"] < held["off"]
    assert held["full"] <= 0.25 * held["off"]
    assert held["full"] == 4 * ROWS.nbytes + 4, "the inputs of the layers after the first, the last output, the loss"
    assert peak["full"] < peak["selective"] < peak["off"]


def test_the_step_that_learns_takes_no_more_than_a_few_values(mode):
    """While one region's forward runs, it holds what that region saves, as its replay does."""
    model, _ = stack(mode)
    (first, first_peak, left), _, (later, later_peak, _) = (step_bytes(model) for _ in range(3))
    assert left == 0
    assert first - later <= 4 * 20 * 64 * 8, "for each of 4 layers 64 values of 20 tensors or less"
    assert first_peak <= 1.01 * later_peak


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "gemma3n", "mamba", "bert", "nemotron_h"])
def test_less_is_held_by_real_models(name):
    inputs = zoo.batch(name, use_cache=False)
    held = {}
    for mode in ("off", *MODES):
        model = zoo.ZOO[name]() if mode == "off" else checkpointed_zoo(name, mode)[1]
        for _ in range(3):
            model.zero_grad()
            with Bytes() as measured:
                loss = model(**inputs).loss
                held[mode] = measured.live_bytes()
                loss.backward()
    assert held["full"] < held["selective"] < held["off"]


def num_tensors():
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "gemma3n", "mamba", "wav2vec2_conformer"])
def test_twenty_steps_leave_no_more_than_one(name, mode):
    inputs = zoo.batch(name, use_cache=False)
    _, model, _ = checkpointed_zoo(name, mode, labelled=False)
    counts = []
    for seed in range(20):
        zoo.train_step(model, inputs, seed)
        counts.append(num_tensors())
    assert len(set(counts[3:])) == 1


class Watching(Mlp):
    """Keep a weak reference to an activation inside the region, and to what it is made of."""

    seen: list = []

    def forward(self, x):
        y = self.up(self.norm(x)).sigmoid()
        Watching.seen += [weakref.ref(y), weakref.ref(y.untyped_storage())]
        return x + self.down(y.sin()).tanh()


@pytest.fixture
def watched(mode):
    torch.manual_seed(0)
    _, model, handle = stacked(mode, ROWS, Watching(), Watching())
    Watching.seen.clear()
    return model, handle


def dead():
    return [ref() is None for ref in Watching.seen]


def test_activations_die_with_the_forward_that_made_them(watched):
    model, handle = watched
    model(ROWS).sum().backward()  # the first call learns
    Watching.seen.clear()
    out = model(ROWS)
    assert dead() == [True] * 4
    out.sum().backward()
    assert dead() == [True] * 8
    assert calls(handle) == (4, 4)


@pytest.mark.parametrize("end", ["dropped", "detached", "error in backward"])
def test_forwards_without_backward_leak_nothing(end, watched):
    model, handle = watched
    with Bytes() as measured:
        for _ in range(3):
            out = model(ROWS)
            if end == "error in backward":
                out.register_hook(_fail)
                with pytest.raises(ZeroDivisionError):
                    out.sum().backward()
            if end == "detached":
                out = out.detach()
        del out
        assert measured.live_bytes() == 0
    assert dead() == [True] * len(Watching.seen)
    assert handle.stats().replayed_calls == 0


def _fail(grad):
    raise ZeroDivisionError


def test_a_failing_region_leaks_nothing(mode):
    class Failing(Mlp):
        def forward(self, x):
            y = super().forward(x)
            if not self.fails:
                return y
            raise ZeroDivisionError

    Failing.fails = False
    _, model, _ = stacked(mode, ROWS, Failing())
    Failing.fails = True
    with Bytes() as measured:
        for _ in range(3):
            with pytest.raises(ZeroDivisionError) as caught:
                model(ROWS)
            del caught
        assert measured.live_bytes() == 0
    Failing.fails = False
    assert step_bytes(model)[2] == 0


def test_retaining_the_graph_gives_the_same_gradients_and_holds_nothing_between(watched):
    model, handle = watched
    model(ROWS).sum().backward()
    model.zero_grad()
    with Bytes() as measured:
        loss = model(ROWS).square().mean()
        before = measured.live_bytes()
        results = []
        for _ in range(3):
            loss.backward(retain_graph=True)
            results.append(collected(model))
            model.zero_grad()
            held = measured.live_bytes() - sum(t.nbytes for result in results for t in result.values())
            assert held == before
        del loss
        assert measured.live_bytes() == sum(t.nbytes for result in results for t in result.values())
    assert zoo.differing(results[0], results[1]) == zoo.differing(results[0], results[2]) == []
    assert calls(handle) == (4, 2 + 3 * 2)


def test_backward_through_one_of_two_outputs(mode):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = Mlp(), Mlp()

        def forward(self, x):
            return self.one(x), self.other(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Two()])

        def forward(self, x):
            one, other = self.layers[0](x)
            return one.square().mean() + 0 * other.sum()

    torch.manual_seed(0)
    plain = Model()
    model, handle = checkpointed(plain, mode, ROWS)
    for _ in range(2):
        results = []
        for m in (plain, model):
            m.zero_grad()
            m.layers[0](ROWS)[0].square().mean().backward()
            results.append(collected(m))
        assert zoo.differing(*results) == []
    assert results[0]["layers.0.other.up.weight"] is None
    assert calls(handle) == (2, 2)
