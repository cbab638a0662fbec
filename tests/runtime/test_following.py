"""From the third call on a selective region watches no function, keeps the same, and stays exact whatever changes."""

import copy
import io
import itertools
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import memopt
from memopt.analyze.twin import has_hooks
from memopt.runtime.replay import run as run_module
from memopt.runtime.replay.captures import capture_output
from memopt.runtime.replay.keeping import Keeping
from tests import zoo
from tests.runtime.checkpoints import Stack, checkpointed, gradients, stacked

ROWS, WIDTH = 1280, 256
"""Of a size that nothing of it is kept for being small: more than 1 MiB."""

FOUND = [
    "llama", "qwen3", "phi3", "gemma3", "gpt2", "gpt_neox", "gemma4", "mamba2", "falcon_h1", "modernbert", "t5", "whisper",
    "qwen2_5_vl",
]  # fmt: skip
"""Models all of whose kept results are found again."""
NOT_FOUND = ["bloom", "gpt_oss", "big_bird"]
"""Models with results that are neither saved nor returned by a module."""
DYNAMIC = ["mixtral", "granite_moe"]
"""Models whose experts take as many rows as are routed to them: no call is like another."""


@pytest.fixture
def watched(monkeypatch):
    """The regions that watched functions, one entry a call."""
    seen = []

    class Counting(Keeping):
        def __init__(self, policy, frame, shelf, drop):
            seen.append(frame.fqn)
            super().__init__(policy, frame, shelf, drop)

    monkeypatch.setattr(run_module, "Keeping", Counting)
    return seen


def rows(seed=0):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def assert_alike(plain, model, x, seed=0):
    assert zoo.differing(gradients(plain, x, seed=seed), gradients(model, x, seed=seed)) == []


def train(name, num_steps, watched, *, varied=False):
    """Return by step how many regions watched functions, and the bytes that all kept; training is exact."""
    inputs = zoo.batch(name, use_cache=False)
    plain = zoo.ZOO[name]()
    traced = inputs | {"position_ids": torch.arange(zoo.SEQ_LENGTH).expand(3, zoo.BATCH_SIZE, -1)}
    graph = memopt.analyze(plain, traced if name == "qwen2_5_vl" else inputs)
    model = zoo.ZOO[name]()
    if varied:
        for one in (plain, model):
            one.set_experts_implementation("eager")
    handle = memopt.apply(model, memopt.plan(graph, activation_checkpoint="selective"))
    numbers, kept = [], [0]
    for seed in range(num_steps):
        watched.clear()
        if varied:
            inputs["input_ids"] = torch.randint(5, zoo.VOCAB, inputs["input_ids"].shape)
        assert zoo.differing(zoo.train_step(plain, inputs, seed), zoo.train_step(model, inputs, seed)) == []
        numbers.append(len(watched))
        kept.append(handle.stats().kept_results_bytes)
    return numbers, [after - before for before, after in itertools.pairwise(kept)]


@pytest.mark.parametrize("name", FOUND)
def test_the_third_step_watches_no_function_and_keeps_the_same(name, watched):
    numbers, kept = train(name, 4, watched)
    assert numbers[0] > 0
    assert numbers[2:] == [0, 0]
    assert len(set(kept)) == 1


@pytest.mark.parametrize("name", NOT_FOUND)
def test_functions_are_watched_for_good_where_a_result_cannot_be_found(name, watched):
    numbers, kept = train(name, 4, watched)
    assert numbers[3] > 0
    assert len(set(kept)) == 1


@pytest.mark.parametrize("name", DYNAMIC)
def test_routing_that_differs_from_step_to_step_ends_with_functions_watched(name, watched):
    numbers, kept = train(name, 8, watched, varied=True)
    assert numbers[-1] > 0
    assert min(kept) > 0


class Branching(nn.Module):
    """Two products, of which every other is kept; what is done with them depends on a flag."""

    def __init__(self, choose):
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5) for _ in range(2))
        self.choose = choose

    def forward(self, x, is_usual):
        return self.choose(self, x, is_usual)


class Holder(nn.Module):
    def __init__(self, choose):
        super().__init__()
        self.inner = Branching(choose)

    def forward(self, x, is_usual):
        return self.inner(x, is_usual).double().sin().cos().sigmoid().mul(2).exp().float()


def other_output(self, x, is_usual):
    one, other = F.linear(x, self.one), F.linear(x, self.other)
    return one if is_usual else other


def other_order(self, x, is_usual):
    first, second = (self.one, self.other) if is_usual else (self.other, self.one)
    y = F.linear(x, first)
    F.linear(x, second)
    return y


def other_view(self, x, is_usual):
    y = F.linear(x, self.one)
    return y if is_usual else y.view(WIDTH, ROWS).t()


def a_sum(self, x, is_usual):
    y = F.linear(x, self.one)
    return y if is_usual else y + 1


def a_write(self, x, is_usual):
    y = F.linear(x, self.one)
    return y if is_usual else y.mul_(2)


def a_write_behind_its_back(self, x, is_usual):
    y = F.linear(x, self.one)
    if not is_usual:
        y.detach().mul_(2)
    return y


def twice(self, x, is_usual):
    return F.linear(x, self.one) if is_usual else F.linear(F.linear(x, self.one), self.one)


def of_another_function(self, x, is_usual):
    return F.linear(x, self.one) if is_usual else torch.mm(x, self.one)


CHOICES = [
    other_output, other_order, other_view, a_sum, a_write, a_write_behind_its_back, twice, of_another_function,
]  # fmt: skip


@pytest.mark.parametrize("choose", CHOICES)
def test_a_call_that_does_something_else_is_exact(choose, watched):
    torch.manual_seed(0)
    plain = Stack(Holder(choose), Holder(choose))
    model, _ = checkpointed(plain, "selective", rows(), True)
    for is_usual in (True, True, True, False, True, False, True, False, False):
        want, got = (gradients(one, rows(), is_usual) for one in (plain, model))
        assert zoo.differing(want, got) == []
    assert watched[:4] == ["layers.0", "layers.1"] * 2
    assert captures(model) == 2


def heads(x):
    return x.view(16, ROWS // 16, 4, WIDTH // 4).transpose(1, 2)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, is_causal=False, scale=None):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        y = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=is_causal, scale=scale)
        return x + self.out(y.transpose(1, 2).reshape(ROWS, WIDTH)).double().sin().cos().sigmoid().float()


@pytest.fixture
def attending():
    """A plain stack, a checkpointed one that watches no function any more, and their input."""
    torch.manual_seed(0)
    plain, model, handle = stacked("selective", rows(), Attending(), Attending())
    for seed in range(3):
        assert_alike(plain, model, rows(), seed)
    return plain, model, handle


def test_options_of_attention_that_change_from_call_to_call(attending):
    plain, model, _ = attending
    for options in ((True,), (False, 0.1), (True, 0.2), (False,), ()) * 2:
        want, got = (gradients(one, rows(), *options) for one in (plain, model))
        assert zoo.differing(want, got) == []


def test_kernels_that_change_from_call_to_call(attending):
    plain, model, _ = attending
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION) * 3:
        with sdpa_kernel([backend]):
            assert_alike(plain, model, rows())


def test_autocast_that_is_switched_on_and_off(attending, watched):
    plain, model, _ = attending
    for enabled in (True, True, True, False, True, False):
        watched.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert_alike(plain, model, rows())
    assert not watched


def test_parameters_that_are_frozen_and_freed(attending):
    plain, model, _ = attending
    names = [name for name, _ in plain.named_parameters() if "layers.1" not in name]
    for number in range(2 * len(names)):
        for one in (plain, model):
            parameter = one.get_parameter(names[number % len(names)])
            parameter.requires_grad_(not parameter.requires_grad)
        assert_alike(plain, model, rows())


def test_more_shapes_than_are_remembered(watched):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, 2)) for _ in range(1)]
    plain, model, _ = stacked("selective", rows(), *layers)
    for _ in range(3):
        for num_rows in range(1, 20):
            assert_alike(plain, model, rows()[:num_rows])


@pytest.mark.parametrize("prepend", [False, True])
def test_a_hook_that_is_put_on_later_and_changes_the_output(attending, prepend):
    plain, model, _ = attending
    handles = []
    for one in (plain, model):
        handles += [
            layer.qkv.register_forward_hook(lambda m, args, out: out * 2, prepend=prepend) for layer in one.layers
        ]
    for _ in range(3):
        assert_alike(plain, model, rows())
    for one in handles:
        one.remove()
    for _ in range(3):
        assert_alike(plain, model, rows())


def test_a_forward_of_its_own_that_a_module_gets_later(attending):
    plain, model, _ = attending
    for one in (plain, model):
        linear = one.layers[0].qkv
        linear.forward = lambda x, linear=linear: F.linear(x.sin(), linear.weight, linear.bias)
    for _ in range(3):
        assert_alike(plain, model, rows())


def captures(model):
    return sum(hook is capture_output for m in model.modules() for hook in m._forward_hooks.values())


def test_a_copy_and_a_pickle_find_for_themselves_and_undo_leaves_no_hook(attending, watched):
    plain, model, handle = attending
    assert captures(model) > 0
    assert not has_hooks(model), "of the user"
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    others = [copy.deepcopy(model), torch.load(buffer, weights_only=False)]
    for other in others:
        watched.clear()
        for seed in range(4):
            assert_alike(plain, other, rows(), seed)
        assert 0 < len(watched) <= 4
        memopt.undo(other)
        assert captures(other) == 0
        assert_alike(plain, other, rows())
    handle.undo()
    assert captures(model) == 0
    assert [list(m._forward_hooks) for m in model.modules()] == [list(m._forward_hooks) for m in plain.modules()]


def test_two_threads_in_the_same_modules(attending, watched):
    _, model, _ = attending
    single = copy.deepcopy(model)
    want = [torch.autograd.grad(single(rows(seed)).square().sum(), list(single.parameters())) for seed in range(2)]
    got = {}

    def work(seed):
        for _ in range(5):
            got[seed] = torch.autograd.grad(model(rows(seed)).square().sum(), list(model.parameters()))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(2):
        assert all(map(torch.equal, want[seed], got[seed]))


def test_backward_in_any_order_and_twice(attending):
    plain, model, _ = attending
    for order in itertools.permutations(range(3)):
        results = []
        for one in (plain, model):
            one.zero_grad()
            losses = [one(rows(seed)).square().sum() for seed in range(3)]
            for index in order:
                losses[index].backward(retain_graph=index == 1)
            losses[1].backward()
            results.append([p.grad for p in one.parameters()])
        assert all(map(torch.equal, *results))


def test_a_result_that_is_written_to_after_the_forward_is_computed_again(attending):
    plain, model, _ = attending
    results = []
    for one in (plain, model):
        outputs = []
        hook = one.layers[0].out.register_forward_hook(
            lambda m, args, out, outputs=outputs: outputs.append(out.detach())
        )
        one.zero_grad()
        loss = one(rows()).square().sum()
        outputs[0].zero_()  # nothing saves it
        loss.backward()
        hook.remove()
        results.append([p.grad for p in one.parameters()])
    assert all(map(torch.equal, *results))


def test_a_forward_that_fails_in_between(attending):
    plain, model, _ = attending
    for where in ("norm", "qkv", "out"):

        def fail(module, args, output):
            raise RuntimeError("in between")

        hook = getattr(model.layers[1], where).register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="in between"):
            model(rows())
        hook.remove()
        assert_alike(plain, model, rows())


def test_checkpointed_attention_only(watched):
    torch.manual_seed(0)
    plain, model, _ = stacked("attention-only", rows(), Attending(), Attending())
    for seed in range(4):
        assert_alike(plain, model, rows(), seed)
    assert len(watched) == 2, "attention finds its output among its own saves: no module has to show it first"
    assert captures(model) == 0


class TwoProducts(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5) for _ in range(3))

    def forward(self, x):
        return F.linear(x, self.one), F.linear(x, self.two).exp(), F.linear(x, self.three)


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.two = TwoProducts()

    def forward(self, x):
        one, two, three = self.two(x)
        return (one.double().sin() * two.double().cos() * three.double().exp()).float().sigmoid()


def test_a_module_that_returns_two_results(watched):
    torch.manual_seed(0)
    plain, model, handle = stacked("selective", rows(), Sum(), Sum())
    kept = [0]
    for seed in range(5):
        assert_alike(plain, model, rows(), seed)
        kept.append(handle.stats().kept_results_bytes)
    assert len(watched) == 4
    assert {after - before for before, after in itertools.pairwise(kept)} == {2 * 2 * ROWS * WIDTH * 4}


def ended(y):
    """Return what saves so much that all before it has to be computed again."""
    return y.double().sin().cos().sigmoid().mul(2).exp().float()


def of_another_operand(self, x, is_usual):
    return ended(x @ torch.mm(self.one, self.one if is_usual else self.other))


def of_exchanged_operands(self, x, is_usual):
    q, k = heads(x.sin()).chunk(2)
    q, k = (q, k) if is_usual else (k, q)
    y = F.scaled_dot_product_attention(q, k, q.cos())
    return ended(x * self.one[0] + y.transpose(1, 2).reshape(ROWS // 2, WIDTH).repeat(2, 1))


def without_grad(self, x, is_usual):
    if is_usual:
        return ended(x @ F.linear(self.one, self.other).sin())
    with torch.no_grad():
        y = F.linear(self.one, self.other)
    return ended(x @ ((self.one * self.other).sin() + y))


def in_hooks_of_the_user(self, x, is_usual):
    if is_usual:
        return ended(x @ F.linear(self.one, self.other).sin())
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        y = F.linear(self.one, self.other)
    return ended(x @ ((self.one * self.other).sin() + y))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return F.linear(x, w) * 2

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w * 2, grad.t() @ x * 2


def in_a_function_of_the_user(self, x, is_usual):
    product = F.linear if is_usual else Product.apply
    return ended(x @ product(self.one, self.other).sin())


ALIKE = [of_another_operand, of_exchanged_operands, without_grad, in_hooks_of_the_user, in_a_function_of_the_user]


@pytest.mark.parametrize("choose", ALIKE)
def test_a_call_that_looks_the_same_but_saves_something_else(choose):
    torch.manual_seed(0)
    plain = Stack(Branching(choose), Branching(choose))
    model, _ = checkpointed(plain, "selective", rows(), True)
    for is_usual in (True, True, True, False, True, False, False):
        want, got = (gradients(one, rows(), is_usual) for one in (plain, model))
        assert zoo.differing(want, got) == []


class Chunks(nn.Module):
    """The product of two outputs of one function; under autocast it saves casts of them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        q, k = self.norm(x)[: 2 * WIDTH].chunk(2)
        return ended(x + torch.mm(q, k).float().repeat(ROWS // WIDTH, 1))


def test_casts_of_chunks_of_one_tensor():
    torch.manual_seed(0)
    plain, model, _ = stacked("selective", rows(), Chunks(), Chunks())
    for seed in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            assert_alike(plain, model, rows(), seed)


class Inferring(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        with torch.inference_mode():
            y = self.linear(x)
        return ended(self.linear(x.sin() + y.clone()))


def test_a_result_of_inference_mode():
    torch.manual_seed(0)
    plain, model, _ = stacked("selective", rows(), Inferring(), Inferring())
    for seed in range(4):
        assert_alike(plain, model, rows(), seed)


class ProductOf(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, q, k):
        return ended(torch.mm(q, k).repeat(ROWS // WIDTH, 1) * self.scale)


class Halves(Stack):
    """Gives its layers two halves of one tensor."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(*x[: 2 * WIDTH].view(2, WIDTH, WIDTH).unbind())
        return x


def test_arguments_of_one_storage_that_hooks_of_the_user_take_apart():
    torch.manual_seed(0)
    plain = Halves(ProductOf(), ProductOf())
    model, _ = checkpointed(plain, "selective", rows())
    for seed in range(4):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
            assert_alike(plain, model, rows(), seed)
