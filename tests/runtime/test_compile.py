"""A rewritten model runs eagerly: every graph compiler is refused, anything else may be compiled."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import memopt
from memopt.errors import GraphCompileError
from tests import models
from tests.runtime.steps import SWAP, step

INPUTS = models.batch(batch_size=1, seq_length=16)
X = models.hidden(batch_size=1, seq_length=16)


@pytest.fixture(scope="module")
def model():
    model = models.llama(num_hidden_layers=2)
    memopt.apply(model, SWAP, INPUTS)
    return model


@pytest.fixture(scope="module")
def attention():
    return memopt.swap_wrapper(models.Attention())


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compile_of_the_whole_model(model, fullgraph):
    with pytest.raises(GraphCompileError, match=r"'model\.layers\.0\.self_attn' is rewritten.*memopt\.undo"):
        torch.compile(model, backend="eager", fullgraph=fullgraph)(**INPUTS)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compile_of_one_module(attention, fullgraph):
    with pytest.raises(GraphCompileError):
        torch.compile(attention, backend="eager", fullgraph=fullgraph)(X)


def test_module_compile_of_the_model_and_of_the_module(model, attention):
    try:
        model.compile(backend="eager")
        with pytest.raises(GraphCompileError):
            model(**INPUTS)
    finally:
        model._compiled_call_impl = None
    with pytest.raises(GraphCompileError, match="Attention"):
        attention.compile()


@pytest.mark.parametrize("strict", [False, True])
def test_export(attention, strict):
    with pytest.raises(GraphCompileError):
        torch.export.export(attention, (X,), strict=strict)


def test_jit_fx_and_make_fx(attention):
    with pytest.raises(GraphCompileError):
        torch.jit.trace(attention, (X,))
    with pytest.raises(GraphCompileError):
        torch.jit.script(attention)
    with pytest.raises(GraphCompileError):
        torch.fx.symbolic_trace(attention)
    with pytest.raises(GraphCompileError):
        make_fx(attention)(X)


def test_what_is_compiled_already_is_not_rewritten():
    model = models.llama(num_hidden_layers=1)
    plan = memopt.plan(memopt.analyze(model, INPUTS), **SWAP)
    model.model.layers[0].compile(backend="eager")
    with pytest.raises(GraphCompileError, match=r"model\.layers\.0"):
        memopt.apply(model, plan)
    assert "[" not in model.model.layers[0].self_attn._get_name()


def test_compiling_something_else_is_allowed(model):
    double = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)
    assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0))
    step(model, INPUTS)


def test_force_eager_is_no_compile(model):
    compiled = torch.compile(model, backend="eager")
    with torch.compiler.set_stance("force_eager"):
        assert compiled(**INPUTS).loss.requires_grad


def test_after_undo_it_compiles(model):
    copied = models.llama(num_hidden_layers=2)
    memopt.apply(copied, SWAP, INPUTS).undo()
    assert torch.compile(copied, backend="eager")(**INPUTS).loss.requires_grad
