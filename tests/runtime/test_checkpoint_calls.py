"""What a replay calls again: the forwards in the planned regions, and of the hooks only those that change something."""

import contextlib
import functools
import types
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import memopt
from memopt.runtime.replay.captures import capture_output
from tests import zoo
from tests.runtime.checkpoints import MODES, Stack, calls, checkpointed, gradients, stacked


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


def hooks_of(module):
    """Return a module's forward hooks, but for the one that finds results."""
    return [
        *module._forward_pre_hooks.values(),
        *(h for h in module._forward_hooks.values() if h is not capture_output),
    ]


@contextlib.contextmanager
def counted(model):
    """Count the calls of the forward of every module, by its name; a hook would not see those of a replay."""
    names = {module: name for name, module in model.named_modules()}
    counts = Counter()

    def counting(forward):
        @functools.wraps(forward)
        def call(self, *args, **kwargs):
            counts[names[self]] += 1
            return forward(self, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        forwards = {cls: cls.forward for cls in map(type, model.modules())}
        for cls, forward in forwards.items():
            patch.setattr(cls, "forward", counting(forward))
        yield counts


NUM_REGIONS = {"llama": 2, "qwen3_moe": 2, "gemma3n": 4, "bart": 4, "whisper": 4, "bert": 2}
"""Of bart and whisper self_attn is planned alone, of the others whole layers."""


@pytest.mark.parametrize("name", NUM_REGIONS)
def test_full_recomputes_the_planned_regions_and_nothing_else(name):
    model, inputs = zoo.ZOO[name](), zoo.batch(name, use_cache=False)
    with counted(model) as plain:
        zoo.train_step(model, inputs)
    plain = plain.copy()
    plan = memopt.plan(memopt.analyze(model, inputs), activation_checkpoint="full")
    regions = [key.fqn for key in plan.decisions]
    assert len(regions) == NUM_REGIONS[name]
    with counted(model) as counts:
        memopt.apply(model, plan)
        for _ in range(3):
            counts.clear()
            zoo.train_step(model, inputs)
            inside = {n for n in plain if any(n == region or n.startswith(f"{region}.") for region in regions)}
            assert counts == {n: num * (2 if n in inside else 1) for n, num in plain.items()}
        counts.clear()
        memopt.undo(model)
        zoo.train_step(model, inputs)
        assert counts == plain


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3n", "bert"])
def test_selective_enters_every_layer_again_and_nothing_else(name):
    """How far the replay goes into a layer is a matter of what was kept at its end."""
    model, inputs = zoo.ZOO[name](), zoo.batch(name, use_cache=False)
    plan = memopt.plan(memopt.analyze(model, inputs), activation_checkpoint="selective")
    regions = {key.fqn for key in plan.decisions}
    with counted(model) as plain:
        zoo.train_step(model, inputs)
    plain = plain.copy()
    with counted(model) as counts:
        memopt.apply(model, plan)
        for _ in range(3):
            counts.clear()
            zoo.train_step(model, inputs)
            again = counts - plain
            assert counts.keys() == plain.keys()
            assert all(again[region] == 1 for region in regions)
            assert all(any(n.startswith(region) for region in regions) for n in again)
            assert again <= plain


def watch(model, seen):
    """Register hooks of every kind on every module; return what removes them."""
    handles = []
    for name, module in model.named_modules():
        note = functools.partial(_note, seen, name)
        handles += [
            module.register_forward_pre_hook(note("pre")),
            module.register_forward_pre_hook(note("pre with kwargs"), with_kwargs=True),
            module.register_forward_hook(note("forward")),
            module.register_forward_hook(note("forward with kwargs"), with_kwargs=True),
            module.register_forward_hook(note("always"), always_call=True),
            module.register_forward_hook(note("prepended"), prepend=True, always_call=True),
            module.register_full_backward_pre_hook(note("backward pre")),
            module.register_full_backward_hook(note("backward")),
        ]
    return handles


def _note(seen, name, kind):
    def hook(*args):
        seen.append((name, kind))

    return hook


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_hooks_fire_as_often_and_in_the_same_order(name, mode):
    plain, inputs = zoo.ZOO[name](), zoo.batch(name, use_cache=False)
    model, handle = checkpointed(plain, mode, **inputs)
    seen, other_seen = [], []
    handles = watch(plain, seen) + watch(model, other_seen)
    for seed in range(3):
        want, got = zoo.train_step(plain, inputs, seed), zoo.train_step(model, inputs, seed)
        assert zoo.differing(want, got) == []
        assert len(seen) > 100
        assert other_seen == seen
    for one in handles:
        one.remove()
    assert not any(hooks_of(m) for m in model.modules())
    assert zoo.differing(zoo.train_step(plain, inputs), zoo.train_step(model, inputs)) == []
    assert other_seen == seen
    assert calls(handle)[1] == calls(handle)[0] > 0


def test_global_hooks_fire_as_often(mode):
    plain, inputs = zoo.ZOO["llama"](), zoo.batch("llama", use_cache=False)
    model, _ = checkpointed(plain, mode, **inputs)
    counts = []
    for one in (plain, model):
        names = {module: name for name, module in one.named_modules()}
        count = Counter()

        def hook(module, *rest, names=names, count=count):
            count[names.get(module), len(rest)] += 1

        handles = [
            register_module_forward_pre_hook(hook),
            register_module_forward_hook(hook),
            register_module_forward_hook(hook, with_kwargs=True),
            register_module_forward_hook(hook, always_call=True),
        ]
        try:
            zoo.train_step(one, inputs)
        finally:
            for handle in handles:
                handle.remove()
        counts.append(count)
    assert counts[0] == counts[1]
    assert counts[0]["model.layers.0.mlp", 1] == counts[0]["model.layers.0.mlp", 3] == 1


class Mlp(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.calls = Counter()

    def forward(self, x):
        return x + self.down(self.up(x).sin().exp())


def doubled_output(module, args, output):
    return output * 2


def doubled_output_with_kwargs(module, args, kwargs, output):
    return output * 2


def doubled_input(module, args):
    return (args[0] * 2,)


def doubled_input_with_kwargs(module, args, kwargs):
    return (args[0] * 2,), kwargs


def written_output(module, args, output):
    output.mul_(2)


CHANGES = {
    "output": lambda m: m.register_forward_hook(doubled_output),
    "output with kwargs": lambda m: m.register_forward_hook(doubled_output_with_kwargs, with_kwargs=True),
    "output always": lambda m: m.register_forward_hook(doubled_output, always_call=True),
    "output in place": lambda m: m.register_forward_hook(written_output),
    "input": lambda m: m.register_forward_pre_hook(doubled_input),
    "input with kwargs": lambda m: m.register_forward_pre_hook(doubled_input_with_kwargs, with_kwargs=True),
}


@pytest.mark.parametrize("removed", [False, True], ids=["stays", "removed before backward"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_hook_that_changes_something_is_called_in_the_replay(change, removed, mode):
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    plain, model, handle = stacked(mode, x, Mlp(), Mlp())
    unhooked = gradients(plain, x)
    results = []
    for one in (plain, model):
        hooks = [CHANGES[change](layer.up) for layer in one.layers]

        def loss_of(out, hooks=hooks):
            for hook in hooks if removed else ():
                hook.remove()
            return out.square().sum()

        results.append([gradients(one, x, loss_of=loss_of)])
        if not removed:
            results[-1].append(gradients(one, x))
        for hook in hooks:
            hook.remove()
        results[-1].append(gradients(one, x))
        assert not any(hooks_of(m) for m in one.modules())
    for want, got in zip(*results, strict=True):
        assert zoo.differing(want, got) == []
    assert zoo.differing(results[0][0], unhooked)
    assert calls(handle) == (2 * len(results[0]),) * 2


def test_a_hook_that_is_added_before_backward_is_not_called(mode):
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    plain, model, _ = stacked(mode, x, Mlp(), Mlp())
    want = gradients(plain, x)
    seen = []

    def loss_of(out):
        model.layers[0].up.register_forward_hook(lambda *args: seen.append(args) or args[-1] * 2)
        return out.square().sum()

    assert zoo.differing(want, gradients(model, x, loss_of=loss_of)) == []
    assert seen == []


def with_cosine(self, x):
    self.calls["patched"] += 1
    return x + self.down(self.up(x).cos().exp())


def thrice(self, x):
    self.calls += 1
    return nn.functional.linear(x, self.weight, self.bias) * 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_forwards_of_instances_are_called_in_the_replay(when, mode):
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    plain = Stack(Mlp(), Mlp())
    model, handle = (None, None) if when == "before" else checkpointed(plain, mode, x)

    def patch(one):
        one.layers[0].forward = types.MethodType(with_cosine, one.layers[0])
        one.layers[1].up.calls = 0
        one.layers[1].up.forward = types.MethodType(thrice, one.layers[1].up)

    unpatched = gradients(plain, x)
    if when == "after":
        patch(model)
    patch(plain)
    if when == "before":
        model, handle = stack_with_own_forwards(plain, mode, x, patch)
    for seed in range(2):
        plain.layers[0].calls.clear(), model.layers[0].calls.clear()
        plain.layers[1].up.calls = model.layers[1].up.calls = 0
        want, got = gradients(plain, x, seed=seed), gradients(model, x, seed=seed)
        assert zoo.differing(want, got) == []
        assert zoo.differing(want, unpatched)
        assert (plain.layers[0].calls["patched"], plain.layers[1].up.calls) == (1, 1)
        assert model.layers[0].calls["patched"] == 1  # called twice, but what a module counts is as after one forward
    assert calls(handle) == (4, 4)


def stack_with_own_forwards(plain, mode, x, patch):
    """Return a checkpointed stack with the same weights, patched before; a copy's forward would be the original's."""
    model = Stack(Mlp(), Mlp())
    model.load_state_dict(plain.state_dict())
    patch(model)
    graph = memopt.analyze(model, (x,))
    return model, memopt.apply(model, memopt.plan(graph, activation_checkpoint=mode))
