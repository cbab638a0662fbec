"""Which results a selective region keeps, and which it must not."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tests import zoo
from tests.runtime.checkpoints import MODES, Stack, calls, checkpointed, checkpointed_zoo, collected, gradients, stacked

ROWS, WIDTH = 2048, 256
"""Of a size that nothing of it is kept for being small: 2 MiB."""


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


class Ran(TorchFunctionMode):
    """The functions that really run: those that a kept result stands for do not come as far."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.ops = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        if Ops.at is not None and Ops.function == func.__name__:
            self.ops.append(Ops.at)
        return func(*args, **(kwargs or {}))


def run_engine(loss):
    """Call backward, which itself would take the mode off for as long as it runs."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)


def ran_in_backward(run, *args):
    """Call a function that returns a loss, and return what ran in its backward."""
    loss = run(*args)
    with Ran() as ran:
        run_engine(loss)
    return ran


def heads(x):
    return x.view(16, ROWS // 16, 4, WIDTH // 4).transpose(1, 2)


def attended(x, w, **options):
    y = F.scaled_dot_product_attention(heads(x), heads(x), heads(x), **options)
    return y.transpose(1, 2).reshape(ROWS, WIDTH)


def batches(x):
    return x.view(2, ROWS // 2, WIDTH)


def joined(x):
    return x.reshape(ROWS, WIDTH)


def interpolated(x, w):
    return F.interpolate(x[None, None, ::2], size=(ROWS, WIDTH), mode="bilinear")[0, 0]


def grouped(x, w):
    ends = torch.arange(1, 3, dtype=torch.int32) * (ROWS // 2)
    return F.grouped_mm(x, w.expand(2, -1, -1), offs=ends)


OPS = {
    # of all these together every other is kept
    "linear": (True, "linear", F.linear),
    "linear of 3 dimensions": (True, "linear", lambda x, w: joined(F.linear(batches(x), w))),
    "mm": (True, "mm", torch.mm),
    "Tensor.mm": (True, "mm", lambda x, w: x.mm(w)),
    "matmul": (True, "matmul", torch.matmul),
    "Tensor.matmul": (True, "matmul", lambda x, w: joined(batches(x).matmul(w))),
    "@": (True, "matmul", lambda x, w: x @ w),
    "grouped_mm": (True, "_grouped_mm", grouped),
    # always
    "linear with bias": (None, "linear", lambda x, w: F.linear(x, w, w[0])),
    "addmm": (None, "addmm", lambda x, w: torch.addmm(w[0], x, w)),
    "bmm": (None, "bmm", lambda x, w: joined(torch.bmm(batches(x), w.expand(2, -1, -1)))),
    "matmul of batches": (None, "matmul", lambda x, w: joined(batches(x) @ w.expand(2, -1, -1))),
    "baddbmm": (None, "baddbmm", lambda x, w: joined(torch.baddbmm(w[:1], batches(x), w.expand(2, -1, -1)))),
    "einsum": (None, "einsum", lambda x, w: torch.einsum("ij,jk->ik", x, w)),
    "conv1d": (None, "conv1d", lambda x, w: F.conv1d(x.t()[None], w[:, None, :3], padding=1, groups=WIDTH)[0].t()),
    "interpolate": (None, "interpolate", interpolated),
    "attention": (None, "scaled_dot_product_attention", attended),
    # never
    "topk": (False, "topk", lambda x, w: torch.topk(x, WIDTH)[0]),
    "softmax": (False, "softmax", lambda x, w: F.softmax(x, -1)),
    "layer_norm": (False, "layer_norm", lambda x, w: F.layer_norm(x, (WIDTH,))),
    "attention with dropout": (False, "scaled_dot_product_attention", lambda x, w: attended(x, w, dropout_p=0.3)),
}  # fmt: skip
"""By name: None for always, True for every other, False for never; the function that is called; how."""


class Ops(nn.Module):
    """Functions in a row, and in the end more saves than may be kept in the place of the last result."""

    at = function = None

    def __init__(self, names):
        super().__init__()
        self.names = tuple(names)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in self.names)

    def forward(self, x):
        x = x * self.scale
        for name, w in zip(self.names, self.weights, strict=True):
            _, Ops.function, op = OPS[name]
            Ops.at = name
            y = op(x, w)
            Ops.at = None
            x = x + y.sin()
        return x.sin().cos().sigmoid().tanh()


@contextlib.contextmanager
def nothing_left():
    try:
        yield
    finally:
        Ops.at = None


def rows():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def ops_run_again(mode, *names, calls_of_layer=1):
    """Return what ran in the forward, and what of it in the replay; gradients must be exact."""
    layer = Ops(names)
    x = rows()
    plain, model, handle = stacked(mode, x, *[layer] * calls_of_layer)
    num_steps = 2 if mode == "selective" else 1
    for seed in range(num_steps):
        want = gradients(plain, x, seed=seed)
        with Ran() as first:
            model.zero_grad()
            torch.manual_seed(seed)
            y = x.clone().requires_grad_()
            loss = model(y).square().sum()
        with nothing_left(), Ran() as ran:
            run_engine(loss)
        assert zoo.differing(want, collected(model) | {"loss": loss.detach(), "input": y.grad}) == []
        assert first.ops == list(names) * calls_of_layer
    assert calls(handle) == (num_steps * calls_of_layer,) * 2
    return ran.ops


@pytest.mark.parametrize("name", OPS)
def test_every_function_is_kept_or_called_again_as_the_table_says(name):
    """Three of them in one region."""
    kept = OPS[name][0]
    expected = {None: [], True: [name], False: [name] * 3}[kept]
    assert ops_run_again("selective", *[name] * 3) == expected
    assert ops_run_again("full", *[name] * 3) == [name] * 3
    assert ops_run_again("attention-only", *[name] * 3) == ([] if name == "attention" else [name] * 3)


def test_matrix_products_alternate_whatever_function_they_are_called_by():
    alternating = [name for name, (kept, *_) in OPS.items() if kept is True]
    assert ops_run_again("selective", *alternating) == alternating[1::2]


def test_what_is_always_kept_does_not_count():
    names = ["linear", "addmm", "mm", "linear with bias", "topk", "attention", "matmul", "attention with dropout", "@"]
    assert ops_run_again("selective", *names) == ["mm", "topk", "attention with dropout", "@"]


def test_every_call_of_a_region_counts_anew():
    assert ops_run_again("selective", "linear", "mm", "matmul", calls_of_layer=3) == ["mm"] * 3


LARGE = 2, 512, 512


class Writing(nn.Module):
    """Compute a product, write to it, and need what it was before, and after."""

    def __init__(self, width, where):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.where = where

    def forward(self, x):
        y = self.linear(x)
        before = (y * 2).sin().cos().sigmoid().tanh()
        WRITES[self.where](y)
        return y, before + (y * 3).sin().cos().sigmoid().tanh()


def _nothing(y):
    pass


WRITES = {
    "result": lambda y: y.add_(1),
    "view": lambda y: y.view(-1)[::2].mul_(2),
    "item": lambda y: y.__setitem__((slice(None), 0), 0.0),
    "detached": lambda y: y.detach().add_(1),
    "out": lambda y: torch.add(y.detach(), 1, out=y.detach()),
    "after": _nothing,
    "nowhere": _nothing,
}


class Outer(Stack):
    """One layer, and a write to what it returns."""

    def forward(self, x):
        y, z = self.layers[0](x)
        if self.layers[0].where == "after":
            y += 1
        return y.square().mean() + z.square().mean()


@pytest.mark.parametrize("shape", [(2, 3, 16), (4, 16), LARGE], ids=["3 dimensions", "2 dimensions", "large"])
@pytest.mark.parametrize("where", [where for where in WRITES if where != "nowhere"])
def test_a_result_that_is_written_to_is_not_kept(where, shape):
    """The version of a product of three dimensions does not tell: it comes from _unsafe_view."""
    torch.manual_seed(0)
    x = torch.randn(shape)
    plain = Outer(Writing(shape[-1], where))
    model, handle = checkpointed(plain, "selective", x)
    for seed in range(2):
        assert zoo.differing(gradients(plain, x, seed=seed), gradients(model, x, seed=seed)) == []
        assert ran_in_backward(model, x.clone().requires_grad_()).names.count("linear") == 1
    if shape == LARGE and where != "after":  # of small ones other things are kept
        assert handle.stats().kept_results_bytes == 0
    assert calls(handle) == (4, 4)


def test_a_result_that_nobody_writes_to_is_kept():
    x = torch.randn(LARGE)
    model, handle = checkpointed(Outer(Writing(LARGE[-1], "nowhere")), "selective", x)
    assert ran_in_backward(model, x.clone().requires_grad_()).names.count("linear") == 0
    assert handle.stats().kept_results_bytes == x.nbytes


def step_of(name, model, **options):
    inputs = zoo.batch(name, use_cache=False)
    torch.manual_seed(0)
    with Ran() as first:
        loss = model(**inputs, **options).loss
    return first, ran_in_backward(lambda: loss)


@pytest.mark.parametrize(
    ("name", "dear", "num_again"),
    [
        ("gpt_oss", {"_grouped_mm"}, 4),  # the experts' bias is added to the product in place
        ("big_bird", {"matmul"}, 24),
        ("gemma3n", {"matmul"}, 4),  # AltUp adds to its predictions
    ],
)
def test_products_that_models_write_to_are_not_kept(name, dear, num_again):
    plain = zoo.ZOO[name]()
    model, handle = checkpointed(plain, "selective", **zoo.batch(name, use_cache=False))
    first, again = step_of(name, model)
    assert sum(n in dear for n in first.names) >= num_again
    assert sum(n in dear for n in again.names) == num_again
    assert handle.stats().kept_results_bytes > 0
    step_of(name, plain)
    assert zoo.differing(collected(plain), collected(model)) == []


ATTENTION = "scaled_dot_product_attention"


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3n"])
def test_attention_is_not_run_in_the_replay(name):
    plain = zoo.ZOO[name]()
    inputs = zoo.batch(name, use_cache=False)
    num_layers = plain.config.num_hidden_layers
    for mode, num_again in {"full": num_layers, "selective": 0, "attention-only": 0}.items():
        _, model, handle = checkpointed_zoo(name, mode)
        want = zoo.train_step(plain, inputs)
        assert zoo.differing(want, zoo.train_step(model, inputs)) == []
        first, again = step_of(name, model)
        assert first.names.count(ATTENTION) == num_layers
        assert again.names.count(ATTENTION) == num_again
        assert calls(handle) == (2 * num_layers,) * 2


class Dropping(nn.Module):
    """Attention with dropout between other dropouts, which take their numbers from the same stream."""

    def __init__(self, dropout):
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), dropout

    def forward(self, x):
        q, k, v = self.qkv(F.dropout(x, 0.2)).chunk(3, -1)
        y = attended_by(q, k, v, self.dropout)
        return F.dropout(self.out(F.dropout(y, 0.3)).sin().cos().sigmoid(), 0.2)


def attended_by(q, k, v, dropout):
    y = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), None, dropout)
    return y.transpose(1, 2).reshape(ROWS, WIDTH)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("mode", ["selective", "attention-only"])
def test_attention_with_dropout_is_not_kept_and_the_following_dropouts_are_the_same(dropout, mode):
    torch.manual_seed(0)
    plain, model, _ = stacked(mode, rows(), Dropping(dropout), Dropping(dropout))
    for seed in range(2):
        want = gradients(plain, rows(), seed=seed)
        assert zoo.differing(want, gradients(model, rows(), seed=seed)) == []
    assert zoo.differing(want, gradients(plain, rows(), seed=7))
    ran = ran_in_backward(lambda: model(rows()).square().mean())
    assert ran.names.count(ATTENTION) == (2 if dropout else 0)


def test_attention_dropout_of_a_model(mode):
    plain = zoo.ZOO["llama"](attention_dropout=0.3)
    inputs = zoo.batch("llama", use_cache=False)
    model, _ = checkpointed(plain, mode, **inputs)
    for seed in range(2):
        assert zoo.differing(zoo.train_step(plain, inputs, seed), zoo.train_step(model, inputs, seed)) == []
    assert step_of("llama", model)[1].names.count(ATTENTION) == 2


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "gpt_oss", "gemma3n", "mamba", "bert"])
def test_under_autocast(name, mode):
    """Products save casts of their operands, which are made anew."""
    inputs = zoo.batch(name, use_cache=False)
    plain, model, handle = checkpointed_zoo(name, mode)

    def step(one, seed):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            one.zero_grad()
            torch.manual_seed(seed)
            loss = one(**inputs).loss
        loss.backward()  # outside, as one does
        return collected(one) | {"loss": loss.detach()}

    for seed in range(3):
        assert zoo.differing(step(plain, seed), step(model, seed)) == []
    assert (handle.stats().kept_results_bytes > 0) == (mode == "selective")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first, again = step_of(name, model)
    dear = {"linear", "addmm", "_grouped_mm", ATTENTION}
    if mode == "selective":
        assert sum(n in dear for n in again.names) < 0.7 * sum(n in dear for n in first.names)
    assert calls(handle)[0] == calls(handle)[1] > 0
