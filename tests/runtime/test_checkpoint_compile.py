"""What is checkpointed with enable_compile may be compiled, trains as before, and is recomputed in backward."""

import copy
import functools
import io
import shutil
from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

import memopt
from memopt.errors import GraphCompileError, IncompatibleError, RewriteError
from memopt.ir import Action, Decision, Plan, RegionKey
from memopt.passes import ActivationCheckpoint
from memopt.runtime.rewrite import is_rewritten
from tests import zoo
from tests.cases.rewriting import assert_identical, assert_trains_alike, loss_on, trained
from tests.runtime.engines import total_stats

MODES = ("full", "selective")
OPTIONS = {
    "llama": {},
    "gpt2": {},
    "qwen3_moe": {"experts_implementation": "batched_mm"},  # the others follow the routing, which no graph can
}
"""The models that dynamo captures whole."""
COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build(name, **options):
    return zoo.ZOO[name](**(OPTIONS.get(name, {}) | options))


def batch(name):
    return zoo.batch(name, use_cache=False)


def layers_of(model):
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def checkpointed(name, mode, *, compiles=True, **options):
    """Return a model with the plan that its configuration asks for in effect."""
    model, traced = (
        build(name, **options),
        build(name, **{k: v for k, v in options.items() if k not in OPTIONS.get(name, ())}),
    )
    plan = memopt.plan(memopt.analyze(traced, batch(name)), activation_checkpoint=mode, enable_compile=compiles)
    memopt.apply(model, plan)
    assert any(map(is_rewritten, model.modules()))
    return model


def compile_layers(model, backend="aot_eager"):
    for layer in layers_of(model):
        layer.compile(backend=backend, fullgraph=True)
    return model


def trained_whole(model, name):
    """Compile a model as a whole and take a step."""
    got = trained(torch.compile(model, backend="aot_eager"), loss_on(batch(name)))
    return {key.removeprefix("_orig_mod."): tensor for key, tensor in got.items()}


@functools.cache
def plain_by_layers(name):
    """Return what a model without a plan gives, its layers compiled, at two seeds."""
    plain = compile_layers(build(name))
    return [trained(plain, loss_on(batch(name)), seed) for seed in range(2)]


@functools.cache
def plain_whole(name):
    return trained_whole(build(name), name)


def assert_close(want, got, rtol=1e-4, atol=1e-6):
    assert want.keys() == got.keys()
    for name, tensor in want.items():
        assert (tensor is None) == (got[name] is None), name
        if tensor is not None:
            torch.testing.assert_close(got[name], tensor, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def replays(model):
    return total_stats(model).replayed_calls


# equal


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIONS)
def test_layers_that_are_compiled_one_by_one(name, mode):
    """Bit for bit what plain compiled layers give; and nothing replays eagerly, for the graph itself recomputes."""
    model = compile_layers(checkpointed(name, mode))
    for seed, want in enumerate(plain_by_layers(name)):
        got = trained(model, loss_on(batch(name)), seed)
        assert_identical(want, got)
    never_compiled = trained(build(name), loss_on(batch(name)), seed)
    (assert_close if name == "qwen3_moe" else assert_identical)(never_compiled, got)  # its plain graphs differ too
    assert total_stats(model).checkpointed_calls == 0


@pytest.mark.parametrize(
    ("name", "mode"), [("llama", "full"), ("llama", "selective"), ("gpt2", "selective"), ("qwen3_moe", "full")]
)
def test_a_model_that_is_compiled_as_a_whole(name, mode):
    model = checkpointed(name, mode)
    want = plain_whole(name)
    torch._dynamo.reset()
    got = trained_whole(model, name)
    assert_identical(want, got)
    assert_close(trained(build(name), loss_on(batch(name))), got)
    assert total_stats(model).checkpointed_calls == 0


@pytest.mark.parametrize(("name", "mode"), [("llama", "full"), ("gpt2", "selective"), ("gemma3n", "selective")])
def test_the_same_model_run_eagerly_replays(name, mode):
    model = checkpointed(name, mode)
    assert_trains_alike(build(name), model, loss_on(batch(name)))
    assert replays(model) == total_stats(model).checkpointed_calls > 0


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("keys and values in a dict", "selective"),
        ("experts that follow the routing", "selective"),
        ("experts that follow the routing", "full"),
    ],
)
def test_a_region_that_no_graph_can_hold_runs_eagerly(kind, mode):
    """Dynamo broke the graph, and left torch's own selective checkpoint to run eagerly: gradients were wrong by 0.5."""
    if kind.startswith("keys"):
        name, options = "gemma3n", {}
    else:
        name, options = "qwen3_moe", {"experts_implementation": "eager"}
    model = checkpointed(name, mode, **options)
    got = trained_whole(model, name)
    assert replays(model) > 0
    assert_close(trained(build(name, **options), loss_on(batch(name))), got)


class Writing(nn.Module):
    """A layer that writes to the result of a matrix product, after the product was saved for a multiplication."""

    def __init__(self, width=16):
        super().__init__()
        self.one = nn.Linear(width, width, bias=False)
        self.other = nn.Linear(width, width, bias=False)

    def forward(self, x):
        hidden = self.one(x)
        squared = hidden.clone() * x
        hidden.add_(squared)
        return x + self.other(hidden.sigmoid_())


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Writing() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("mode", MODES)
def test_results_that_are_written_to_inside_a_graph(mode):
    """Kept, and written to: a graph is without side effects, so that it keeps the value that backward wants."""
    plain, model, x = Stack(), Stack(), torch.randn(4, 16, generator=torch.Generator().manual_seed(2))
    memopt.apply(model, memopt.plan(memopt.analyze(model, x), activation_checkpoint=mode, enable_compile=True))
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert_trains_alike(plain, model, lambda m: m(x))


@pytest.mark.skipif(COMPILER is None, reason="inductor needs a C++ compiler")
def test_inductor():
    """One layer; where inductor fuses, the last bits differ from eager ones."""
    plain = build("llama", num_hidden_layers=1)
    want = trained(plain, loss_on(batch("llama")))
    for mode in MODES:
        torch._dynamo.reset()
        model = compile_layers(checkpointed("llama", mode, num_hidden_layers=1), "inductor")
        assert_close(want, trained(model, loss_on(batch("llama"))))
        assert total_stats(model).checkpointed_calls == 0


# recomputed


def counting(counts):
    """Return a backend that counts matrix products in the graphs that it is given, by "forward" and "backward"."""
    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}

    def counted(graph, kind):
        counts[kind] += sum(node.target in products for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    return aot_autograd(
        fw_compiler=lambda graph, _: counted(graph, "forward"),
        bw_compiler=lambda graph, _: counted(graph, "backward"),
        partition_fn=min_cut_rematerialization_partition,
    )


@pytest.mark.parametrize(("mode", "backward"), [("off", 14), ("full", 20), ("selective", 17)])
def test_the_graph_of_backward_repeats_what_the_plan_says(mode, backward):
    """Of seven products in a layer, backward needs no result of the last; selective keeps every other of them."""
    model = build("llama", num_hidden_layers=1)
    if mode != "off":
        model = checkpointed("llama", mode, num_hidden_layers=1)
    counts = Counter()
    compile_layers(model, counting(counts))
    trained(model, loss_on(batch("llama")))
    assert counts == {"forward": 7, "backward": backward}


def test_whole_layers_repeat_as_much_as_their_parts():
    model, counts = build("llama", num_hidden_layers=1), Counter()
    whole = Decision(action=Action.RECOMPUTE, by="hand", why="", policy="full", route="compile")
    graph = memopt.analyze(model, batch("llama"))
    memopt.apply(model, Plan(graph=graph).decide({RegionKey("model.layers.0"): whole}))
    compile_layers(model, counting(counts))
    assert_identical(
        trained(build("llama", num_hidden_layers=1), loss_on(batch("llama"))), trained(model, loss_on(batch("llama")))
    )
    assert counts == {"forward": 7, "backward": 20}


# refused


@pytest.mark.parametrize("mode", MODES)
def test_without_the_flag_every_compiler_is_refused(mode):
    model, inputs = checkpointed("llama", mode, compiles=False), batch("llama")
    layer = layers_of(model)[0]
    for fullgraph in (False, True):
        with pytest.raises(
            GraphCompileError, match=r"'model\.layers\.0' is rewritten.*memopt\.undo.*enable_compile: true"
        ):
            torch.compile(model, backend="eager", fullgraph=fullgraph)(**inputs)
    with pytest.raises(GraphCompileError, match=r"'model\.layers\.0' is rewritten.*or plan with enable_compile: true"):
        layer.compile()
    model.compile(backend="eager")
    with pytest.raises(GraphCompileError):
        model(**inputs)
    model._compiled_call_impl = None
    for strict in (False, True):
        with pytest.raises(GraphCompileError):
            torch.export.export(model, (), inputs, strict=strict)
    with pytest.raises(GraphCompileError):
        torch.jit.script(model)
    assert_trains_alike(build("llama"), model, loss_on(inputs))


def test_what_is_compiled_before_a_plan_without_the_flag_names_the_flag():
    model = build("llama")
    plan = memopt.plan(memopt.analyze(model, batch("llama")), activation_checkpoint="full")
    with pytest.raises(GraphCompileError, match=r"is compiled already.*plan with enable_compile: true"):
        memopt.apply(torch.compile(model, backend="eager"), plan)


def test_a_model_that_waits_for_its_first_forward_must_run_it_eagerly():
    model = build("llama")
    memopt.apply(model, {"activation_checkpoint": "full", "enable_compile": True})
    with pytest.raises(GraphCompileError, match=r"first training forward.*give memopt\.apply the inputs"):
        torch.compile(model, backend="eager")(**batch("llama"))


def stack(mode, compiles):
    model, x = Stack(), torch.randn(4, 16, generator=torch.Generator().manual_seed(2))
    memopt.apply(model, memopt.plan(memopt.analyze(model, x), activation_checkpoint=mode, enable_compile=compiles))
    return model, x


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compiles", [False, True])
def test_what_traces_for_something_else_is_refused_with_the_flag_too(mode, compiles):
    model, x = stack(mode, compiles)
    for trace in (
        lambda: torch.jit.trace(model, (x,)),
        lambda: torch.jit.script(model),
        lambda: torch.fx.symbolic_trace(model),
        lambda: make_fx(model)(x),
    ):
        with pytest.raises(GraphCompileError, match="memopt.undo"):
            trace()
    assert_trains_alike(Stack(), model, lambda m: m(x))


def test_swap_excludes_the_flag():
    graph = memopt.analyze(build("llama"), batch("llama"))
    for more in ({}, {"activation_checkpoint": "full"}):
        with pytest.raises(IncompatibleError, match="incompatible with torch.compile"):
            memopt.plan(graph, activation_swap="attention", enable_compile=True, **more)
    with pytest.raises(IncompatibleError, match="incompatible with torch.compile"):
        memopt.apply(build("llama"), {"activation_swap": "attention", "enable_compile": True}, batch("llama"))


def test_a_model_that_is_compiled_first_is_refused_and_left_as_it_was():
    model = build("llama")
    plan = memopt.plan(memopt.analyze(model, batch("llama")), activation_checkpoint="full", enable_compile=True)
    model.model.layers[1].compile(backend="eager")
    with pytest.raises(RewriteError, match=r"'model\.layers\.1' is compiled already; apply the plan first"):
        memopt.apply(model, plan)
    with pytest.raises(RewriteError, match="'OptimizedModule' is compiled already"):
        memopt.apply(torch.compile(build("llama"), backend="eager"), plan)
    assert not any(map(is_rewritten, model.modules()))


def test_a_forward_beside_the_class_is_refused_and_left_as_it_was():
    model = build("llama")
    plan = memopt.plan(memopt.analyze(model, batch("llama")), activation_checkpoint="full", enable_compile=True)
    mlp = model.model.layers[1].mlp
    mlp.forward = mlp.forward
    with pytest.raises(RewriteError, match=r"'model\.layers\.1\.mlp' has a forward of its own.*enable_compile"):
        memopt.apply(model, plan)
    assert not any(map(is_rewritten, model.modules()))


# exported, and called by awkward names


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_is_the_one_without_checkpoints(mode, strict):
    model, inputs = checkpointed("llama", mode), batch("llama")
    exported = torch.export.export(model, (), inputs, strict=strict)
    assert not any("checkpoint" in str(node.target) for node in exported.graph.nodes)
    assert torch.equal(exported.module()(**inputs).loss, build("llama")(**inputs).loss)


class Named(nn.Module):
    """A layer whose arguments have the names of those of torch.utils.checkpoint."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(8, 8)

    def forward(self, x, *, context_fn, debug, use_reentrant, preserve_rng_state, determinism_check, early_stop):
        x = torch.tanh(self.mlp(x) * context_fn) * use_reentrant + preserve_rng_state
        return x if debug and early_stop and determinism_check == "default" else x.sin()


class NamedStack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Named() for _ in range(2))

    def forward(self, x):
        names = {"debug": False, "determinism_check": "none", "early_stop": True, "preserve_rng_state": x.cos()}
        for layer in self.layers:
            x = layer(x, context_fn=x, use_reentrant=3.0, **names)
        return x.square().mean()


@pytest.mark.parametrize("mode", MODES)
def test_arguments_may_be_called_like_those_of_torchs_checkpoint(mode):
    model, x = NamedStack(), torch.randn(4, 8)
    pass_ = ActivationCheckpoint(mode=mode, compiles=True)
    memopt.apply(model, memopt.plan(memopt.analyze(model, x), passes=[pass_]))
    compiled, plain = torch.compile(model, backend="aot_eager", fullgraph=True), NamedStack()
    assert_identical(trained(plain, lambda m: m(x)), trained(model, lambda m: compiled(x)))


# copied, saved, undone


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["deepcopy", "torch.save"])
def test_a_copy_compiles_on_its_own_and_is_undone_on_its_own(mode, way):
    model = checkpointed("llama", mode)
    if way == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
    assert not set(other.modules()) & set(model.modules())
    assert_trains_alike(build("llama"), other, loss_on(batch("llama")), steps=1)
    assert replays(other) > 0 == replays(model)
    counts = Counter()
    compile_layers(other, counting(counts))
    assert_trains_alike(build("llama"), other, loss_on(batch("llama")), steps=1)
    assert counts["backward"] == {"full": 20, "selective": 17}[mode]  # two layers with one graph
    memopt.undo(other)
    assert not any(map(is_rewritten, other.modules()))
    assert any(map(is_rewritten, model.modules()))


@pytest.mark.parametrize("mode", MODES)
def test_after_undo_nothing_is_repeated(mode):
    model, plain, counts = checkpointed("llama", mode), build("llama"), Counter()
    memopt.undo(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    compile_layers(model, counting(counts))
    assert_trains_alike(plain, model, loss_on(batch("llama")), steps=1)
    assert counts == {"forward": 7, "backward": 14}
