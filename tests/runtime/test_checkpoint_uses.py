"""Less usual ways to train: second derivatives, torch.func, the user's own hooks, microbatches, threads."""

import copy
import itertools
import threading
import weakref

import pytest
import torch
import transformers
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from tests import zoo
from tests.runtime.checkpoints import MODES, calls, checkpointed, checkpointed_zoo, collected, gradients, stacked


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


class Mlp(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.dropout(self.up(x.sin()).sin(), 0.2, self.training)).tanh()


ROWS = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def pair(mode):
    torch.manual_seed(0)
    return stacked(mode, ROWS, Mlp(), Mlp())


def second_order(model, seed):
    """Return the gradients of the norm of a gradient."""
    torch.manual_seed(seed)
    x = ROWS.clone().requires_grad_()
    weights = list(model.parameters())
    first = torch.autograd.grad(model(x).square().sum(), [x, *weights], create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), [x, *weights])
    return dict(enumerate([*(g.detach() for g in first), *second]))


def test_gradients_of_gradients(pair):
    plain, model, handle = pair
    for seed in range(3):
        want = second_order(plain, seed)
        assert zoo.differing(want, second_order(model, seed)) == []
        assert all(g.any() for g in want.values())
    assert calls(handle)[0] == 6
    assert calls(handle)[1] >= 6


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_gradients_of_gradients_of_a_model(name, mode):
    plain = zoo.ZOO[name](attn_implementation="eager")  # fused attention has no second derivative
    inputs = zoo.batch(name, use_cache=False)
    model, _ = checkpointed(plain, mode, **inputs)
    results = []
    for one in (plain, model):
        weights = list(one.parameters())
        first = torch.autograd.grad(one(**inputs).loss, weights, create_graph=True)
        penalty = sum(g.square().sum() for g in first)
        results.append(dict(enumerate(torch.autograd.grad(penalty, weights, allow_unused=True))))
    assert zoo.differing(*results) == []


def test_torch_func_steps_aside(pair):
    plain, model, handle = pair
    for train in (False, True):
        for one in (plain, model):
            one.train(train)
        weights = dict(plain.named_parameters())

        def loss_of(one, weights, x):
            return torch.func.functional_call(one, weights, (x,)).square().sum()

        assert zoo.differing(_func_grad(plain, weights, loss_of), _func_grad(model, weights, loss_of)) == []
    plain.eval(), model.eval()
    want, got = (torch.func.vmap(one)(ROWS) for one in (plain, model))
    assert torch.equal(want, got)
    want, got = (torch.func.jacrev(one)(ROWS[0, 0]) for one in (plain, model))
    assert torch.equal(want, got)
    assert calls(handle) == (0, 0)


def _func_grad(one, weights, loss_of):
    torch.manual_seed(0)
    return torch.func.grad(lambda w: loss_of(one, w, ROWS))(weights)


def own_leaves(plain):
    return {name: torch.randn_like(p).requires_grad_() for name, p in plain.named_parameters()}


def views_of_a_vector(plain):
    """As a network gives them that makes the weights of another."""
    shapes = {name: p.shape for name, p in plain.named_parameters()}
    vector = torch.randn(sum(shape.numel() for shape in shapes.values())).requires_grad_()
    parts = (vector * 1).split([shape.numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


@pytest.mark.parametrize("make", [own_leaves, views_of_a_vector])
def test_functional_call_with_other_weights(make, pair):
    """Backward comes when the module has its own again (the checkpoint of torch would take those)."""
    plain, model, handle = pair
    for seed in range(2):
        weights = make(plain)
        results = []
        for one in (plain, model):
            before = [id(p) for p in one.parameters()]
            torch.manual_seed(seed)
            out = torch.func.functional_call(one, weights, (ROWS,))
            grads = torch.autograd.grad(out.square().sum(), list(weights.values()))
            results.append(dict(zip(weights, grads, strict=True)))
            assert [id(p) for p in one.parameters()] == before
        assert zoo.differing(*results) == []
        assert zoo.differing(gradients(plain, ROWS), gradients(model, ROWS)) == []
    assert calls(handle) == (8, 8)


def test_weights_of_a_functional_call_are_let_go(pair):
    _, model, _ = pair
    for _ in range(2):
        weights = views_of_a_vector(model)
        refs = [weakref.ref(w) for w in weights.values()]
        torch.func.functional_call(model, weights, (ROWS,)).sum().backward()
        del weights
        assert all(ref() is None for ref in refs)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "gemma3n"])
def test_saving_on_the_cpu_around_the_model(name, mode):
    inputs = zoo.batch(name, use_cache=False)
    plain, model, handle = checkpointed_zoo(name, mode)
    for seed in range(3):
        want = zoo.train_step(plain, inputs, seed)
        model.zero_grad()
        torch.manual_seed(seed)
        with save_on_cpu():
            loss = model(**inputs).loss
        loss.backward()
        got = collected(model) | {"loss": loss.detach()}
        assert zoo.differing(want, got) == []
    assert calls(handle)[0] == calls(handle)[1] > 0


def test_hooks_around_the_model_get_what_a_region_holds(pair):
    """What is packed by one's own hooks is unpacked by them, and comes back in the replay."""
    plain, model, _ = pair
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.detach().clone()

    def unpack(tensor):
        unpacked.append(tensor.shape)
        return tensor

    for seed in range(2):
        want = gradients(plain, ROWS, seed=seed)
        packed.clear(), unpacked.clear()
        torch.manual_seed(seed)
        model.zero_grad()
        x = ROWS.clone().requires_grad_()
        with saved_tensors_hooks(pack, unpack):
            loss = model(x).square().sum()
            assert packed
            assert not unpacked
        loss.backward()
        assert zoo.differing(want, collected(model) | {"loss": loss.detach(), "input": x.grad}) == []
        assert sorted(packed) == sorted(unpacked)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_eval_no_grad_and_inference_mode_step_aside(name, mode):
    inputs = zoo.batch(name, use_cache=False)
    plain, model, handle = checkpointed_zoo(name, mode)
    with torch.no_grad():
        assert not model(**inputs).loss.requires_grad
    with torch.inference_mode():
        model(**inputs)
    plain.eval(), model.eval()
    assert zoo.differing(zoo.train_step(plain, inputs), zoo.train_step(model, inputs)) == []
    with torch.no_grad():
        assert torch.equal(plain(**inputs).logits, model(**inputs).logits)
    assert calls(handle) == (0, 0)
    plain.train(), model.train()
    assert zoo.differing(zoo.train_step(plain, inputs), zoo.train_step(model, inputs)) == []
    assert calls(handle) == (2, 2)


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
@pytest.mark.parametrize("name", ["gpt2", "qwen3_moe", "gemma3n", "wav2vec2_conformer"])
def test_microbatches_in_flight(name, order, mode):
    """As pipelines schedule them: all forwards, then all backwards, in any order."""
    inputs = zoo.batch(name, use_cache=False)
    plain, model, handle = checkpointed_zoo(name, mode, labelled=False)
    results = []
    for one in (plain, model):
        transformers.set_seed(0)
        one.zero_grad()
        losses = [one(**shifted(inputs, n)).loss for n in range(3)]
        for n in order:
            losses[n].backward()
        results.append(collected(one) | dict(enumerate(loss.detach() for loss in losses)))
    assert zoo.differing(*results) == []
    assert calls(handle)[0] == calls(handle)[1] > 0


def shifted(inputs, n):
    """Return another batch of the same kind."""
    return {key: t.roll(n, 1) if torch.is_tensor(t) else t for key, t in inputs.items()}


def in_threads(*functions):
    """Call functions at the same time; return what they do, or raise what one of them raises."""
    results, errors = [None] * len(functions), []
    barrier = threading.Barrier(len(functions))

    def run(n):
        try:
            barrier.wait()
            results[n] = functions[n]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3n"])
def test_two_threads_train_two_copies(name, mode):
    inputs = zoo.batch(name, use_cache=False)
    plain, model, handle = checkpointed_zoo(name, mode)
    other = copy.deepcopy(model)

    def steps(one):
        return lambda: [zoo.train_step(one, inputs) for _ in range(8)][-1]

    want = steps(plain)()
    for got in in_threads(steps(model), steps(other)):
        assert zoo.differing(want, got) == []
    assert calls(handle)[0] == calls(handle)[1] > 0


def thread_grads(model, inputs):
    """Return gradients without touching those that the parameters have."""
    weights = list(model.parameters())
    for _ in range(8):
        loss = model(**inputs).loss
        grads = torch.autograd.grad(loss, weights, allow_unused=True)
    return {"loss": loss.detach()} | dict(enumerate(grads))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3n"])
def test_two_threads_train_one_model(name, mode):
    batches = [shifted(zoo.batch(name, use_cache=False), n) for n in range(2)]
    plain, model, handle = checkpointed_zoo(name, mode)
    hook = model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: None)
    want = [thread_grads(plain, inputs) for inputs in batches]
    got = in_threads(*(lambda inputs=inputs: thread_grads(model, inputs) for inputs in batches))
    for one, other in zip(want, got, strict=True):
        assert zoo.differing(one, other) == []
    hook.remove()
    assert not model.model.layers[0].mlp._forward_hooks
    assert calls(handle)[0] > 0


def test_backward_in_another_thread(pair):
    plain, model, _ = pair
    want = gradients(plain, ROWS)
    model.zero_grad()
    torch.manual_seed(0)
    x = ROWS.clone().requires_grad_()
    loss = model(x).square().sum()
    in_threads(loss.backward)
    assert zoo.differing(want, collected(model) | {"loss": loss.detach(), "input": x.grad}) == []
