"""Several graphs at once, in any order, twice, and twice differentiated."""

import functools
import itertools
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.runtime import swap_wrapper
from tests import models
from tests.runtime.engines import counters_of, cpu_engine, everything, total_stats
from tests.runtime.steps import SWAP, assert_equal_gradients, gradients


@pytest.fixture(autouse=True)
def poisoned():
    with cpu_engine(poison=True):
        yield


@pytest.fixture
def pair():
    """Return an unwrapped model and a rewritten one that are equal."""
    plain, model = models.SharedAttention(), models.SharedAttention()
    handle = memopt.apply(model, SWAP, models.hidden())
    yield plain, model
    assert handle.stats().copied_out_tensors > 0


def microbatches(num):
    return [models.hidden(seed=seed) for seed in range(num)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_backward_of_three_microbatches_in_any_order(pair, order):
    for model in pair:
        losses = [model(x) for x in microbatches(3)]
        for index in order:
            losses[index].backward()
    assert_equal_gradients(*map(gradients, pair))


@pytest.mark.parametrize("num", [2, 4])
def test_one_forward_one_backward_interleaved(pair, num):
    for model in pair:
        losses = []
        for x in microbatches(num):
            losses.append(model(x))
            if len(losses) > 1:
                losses.pop(0).backward()
        losses.pop().backward()
    assert_equal_gradients(*map(gradients, pair))


def test_two_forwards_in_one_loss(pair):
    for model in pair:
        one, other = (model(x) for x in microbatches(2))
        (one - 2 * other).square().backward()
    assert_equal_gradients(*map(gradients, pair))


def test_gradient_accumulation(pair):
    for model in pair:
        for x in microbatches(4):
            (model(x) / 4).backward()
    assert_equal_gradients(*map(gradients, pair))


def test_retain_graph_twice(pair):
    for model in pair:
        loss = model(models.hidden())
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert_equal_gradients(*map(gradients, pair))


class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.second(self.first(x).tanh()).sigmoid()


def test_double_backward():
    grads = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = Smooth()
        if wrapped:
            swap_wrapper(model, everything)
        x = torch.randn(32, 64, requires_grad=True)
        torch.manual_seed(1)
        (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        first.square().sum().backward()
        grads.append({**gradients(model), "x": x.grad})
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-7)
    assert counters_of(model).copied_in_tensors > 0


def test_backward_to_some_inputs_only(pair):
    for model in pair:
        loss = model(models.hidden())
        loss.backward(inputs=[model.blocks[1].self_attn.qkv.weight], retain_graph=True)
        loss.backward(inputs=[model.blocks[0].mlp.weight])
    assert_equal_gradients(*map(gradients, pair))


def test_two_threads_on_one_model(pair):
    plain, model = pair
    found = {}

    def train(index):
        x = models.hidden(seed=index)
        loss = model(x)
        found[index] = torch.autograd.grad(loss, list(model.parameters()))

    for _ in range(3):
        threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index in range(2):
            expected = torch.autograd.grad(plain(models.hidden(seed=index)), list(plain.parameters()))
            assert all(torch.equal(a, b) for a, b in zip(found[index], expected, strict=True))
    model(models.hidden())


def test_torch_func_steps_aside(pair):
    plain, model = pair
    x = models.hidden(seq_length=512)

    def grads(module):
        parameters = dict(module.named_parameters())
        return torch.func.grad(lambda p: torch.func.functional_call(module, p, (x,), tie_weights=False))(parameters)

    assert_equal_gradients(grads(plain), grads(model))
    model(x)


def test_hooks_of_the_user_inside_and_outside(pair):
    counts = {}
    for name, model in zip(("plain", "rewritten"), pair, strict=True):
        packed = []

        def pack(tensor, packed=packed):
            packed.append(tensor.shape)
            return tensor.detach().clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(models.hidden())
        loss.backward()
        counts[name] = len(packed)
    assert_equal_gradients(*map(gradients, pair))
    assert 0 < counts["rewritten"] < counts["plain"], "the hooks outside see what memopt does not take"


def test_hooks_around_a_region_may_be_any_callable(pair):
    hooks = functools.partial(torch.Tensor.detach), functools.partial(torch.Tensor.clone)
    for model in pair:
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            loss = model(models.hidden())
        loss.backward()
    assert_equal_gradients(*map(gradients, pair))


def test_hooks_of_the_user_inside_a_region_win():
    class Inner(Smooth):
        def forward(self, x):
            with torch.autograd.graph.save_on_cpu():
                return super().forward(x)

    model = swap_wrapper(Inner(), everything)
    model(torch.randn(8, 64)).sum().backward()
    assert counters_of(model).registered_tensors == 0


def test_checkpoint_inside_a_region():
    class Checkpointed(Smooth):
        def forward(self, x):
            return checkpoint(super().forward, x.tanh(), use_reentrant=False)

    grads = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = Checkpointed()
        if wrapped:
            swap_wrapper(model, everything)
        x = torch.ones(32, 64, requires_grad=True)
        model(x * 0.1).sum().backward()
        grads.append({**gradients(model), "x": x.grad})
    assert_equal_gradients(*grads)
    assert counters_of(model).copied_out_tensors > 0


def test_checkpoint_around_a_region_is_left_alone(pair):
    """What it saves is dropped and made again anyway."""
    for model in pair:
        x = models.hidden()
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        x.square().mean().backward()
    assert_equal_gradients(*map(gradients, pair))
    assert total_stats(pair[1]).registered_tensors == 0
    pair[1](models.hidden())


def test_gradient_checkpointing_that_is_switched_on_later():
    plain, model, inputs = models.llama(num_hidden_layers=2), models.llama(num_hidden_layers=2), models.batch()
    handle = memopt.apply(model, SWAP, inputs)
    for one in (plain, model):
        one.gradient_checkpointing_enable()
        one(**inputs).loss.backward()
    assert_equal_gradients(gradients(plain), gradients(model))
    assert handle.stats().registered_tensors == 0
    model.gradient_checkpointing_disable()
    model(**inputs).loss.backward()
    assert handle.stats().copied_out_tensors > 0


def test_a_region_that_calls_itself_and_one_inside_another():
    class Recursive(Smooth):
        def forward(self, x, depth=2):
            x = super().forward(x)
            return self(x, depth - 1) if depth else x

    grads = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Recursive(), Smooth())
        if wrapped:
            swap_wrapper(model[0], everything)
            swap_wrapper(model[1], everything)
            swap_wrapper(model, everything)
        model(torch.ones(32, 64)).sum().backward()
        grads.append(gradients(model))
    assert_equal_gradients(*grads)
    assert counters_of(model[0]).copied_out_tensors > 0


def test_the_chain_prefetches_and_links_past_what_keeps_everything():
    torch.manual_seed(0)
    layers = nn.Sequential(*[Smooth() for _ in range(4)])
    keep = lambda tensor: memopt.CheckpointPolicy.MUST_SAVE  # noqa: E731
    for index, layer in enumerate(layers):
        swap_wrapper(layer, keep if index in (1, 3) else everything)
    manager = memopt.SwapManager()
    for current, following in itertools.pairwise(layers):
        manager.set_forward_prefetch_layer(current, following)
    loads = []
    layers[0].first.register_full_backward_pre_hook(
        lambda *args: loads.append(counters_of(layers[0]).copied_in_tensors)
    )
    layers[1].second.register_full_backward_pre_hook(
        lambda *args: loads.append(counters_of(layers[0]).copied_in_tensors)
    )
    layers[3].first.register_full_backward_hook(lambda *args: loads.append(counters_of(layers[2]).copied_in_tensors))
    layers(torch.randn(16, 64, requires_grad=True)).sum().backward()
    loaded = counters_of(layers[0]).copied_in_tensors
    assert loads[0] > 0, "backward of the last layer, which keeps everything, has prefetched the swapped one before it"
    assert loaded > 0
    assert counters_of(layers[1]).registered_tensors == counters_of(layers[3]).registered_tensors == 0


def test_wrong_use_of_the_manager_says_what_to_do():
    with pytest.raises(memopt.MemoptError, match=r"call swap_wrapper\(module\) first"):
        memopt.SwapManager().set_forward_prefetch_layer(nn.Linear(1, 1), nn.Linear(1, 1))
