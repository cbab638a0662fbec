import json
import logging
import random
from collections import deque
from importlib import resources

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig

import memopt
from memopt.errors import GraphCompileError, IllegalValueError, RequestError, TraceError
from memopt.ir import Kind, outermost
from tests import models, zoo


def preset(name):
    facts = json.loads((resources.files("memopt.presets") / f"{name}.json").read_text())
    return AutoConfig.for_model(**facts)


def test_qwen3_30b_a3b_covers_49_mib_a_layer():
    graph = memopt.analyze(preset("qwen3-30b-a3b"), seq_length=1024, dtype="bfloat16")
    plan = memopt.plan(graph, activation_swap="attention")
    account = memopt.ir.account(plan)
    assert [t.fqn for t in account.targets] == [f"model.layers.{n}.self_attn" for n in range(48)]
    assert {t.covered_bytes for t in account.targets} == {51_380_224}
    assert graph.model.num_parameters == 30_532_122_624
    # GQA is not expanded and no mask is materialized: the naive fake trace says 63 MiB
    assert {t.shape for t in graph.saved if t.field == "key"} == {(1, 4, 1024, 128)}


def test_the_live_model_is_neither_run_nor_changed():
    model = models.llama(attention_dropout=0.1)
    fired = []
    model.model.layers[0].register_forward_hook(lambda *args: fired.append(args))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    rng = torch.get_rng_state()
    model.eval()
    memopt.analyze(model, models.batch(seq_length=16))
    assert not fired
    assert not model.training
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_inputs_by_position_and_models_that_are_not_of_transformers():
    graph = memopt.analyze(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(3, 8))
    assert [(t.owner, t.op, t.shape) for t in graph.saved if t.kind is Kind.ACTIVATION] == [
        ("0", "Addmm", (3, 8)),
        ("1", "Relu", (3, 8)),
    ]
    assert (graph.input.batch_size, graph.input.seq_length) == (3, 8)
    assert graph.input.target_device == "cpu"


def test_every_call_of_a_module_used_again_counts():
    cell = nn.Linear(8, 8)

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = cell

        def forward(self, x):
            for _ in range(5):
                x = self.cell(x).tanh()
            return x

    graph = memopt.analyze(Recurrent(), torch.randn(2, 8))
    assert len(graph.calls_of("cell")) == 5
    assert len([t for t in graph.saved if t.op == "Tanh"]) == 5


def test_a_shared_module_is_one_node_under_all_its_names():
    graph = memopt.analyze(models.SharedAttention(), models.hidden(seq_length=8))
    assert outermost(graph, "self_attn") == ("blocks.0.self_attn", "blocks.1.self_attn")
    assert graph.by_fqn["blocks.2.self_attn"] is graph.by_fqn["blocks.0.self_attn"]
    assert graph.by_fqn["blocks.0.self_attn"].fqns == ("blocks.0.self_attn", "blocks.2.self_attn")
    assert len(graph.calls_of("blocks.0.self_attn")) == 2


def test_saves_of_a_dropped_branch_do_not_count():
    class Dropping(nn.Module):
        def forward(self, x):
            x.exp()
            return x.sin()

    graph = memopt.analyze(Dropping(), torch.randn(4, requires_grad=True))
    assert [t.op for t in graph.saved] == ["Sin"]


def test_flows_lead_from_makers_to_users():
    digraph = memopt.analyze(models.llama(), models.batch(seq_length=8)).to_networkx()
    layer = "model.layers.0"
    assert digraph.edges[f"{layer}.input_layernorm", f"{layer}.self_attn.q_proj"]["kind"] == "flows"
    assert digraph.edges[f"{layer}.self_attn", f"{layer}.self_attn.o_proj"] == {
        "kind": "contains",
        "names": ("o_proj",),
        "flows": True,
    }
    assert digraph.edges[f"{layer}.mlp.act_fn", f"{layer}.mlp"]["kind"] == "flows"


@pytest.mark.parametrize(
    ("dtype", "masked", "kernel"),
    [
        ("bfloat16", False, "Flash"),
        ("bfloat16", True, "Efficient"),
        ("float32", True, "Efficient"),
        ("float32", False, None),
    ],
)
def test_a_gpu_kernel_is_planned_for_without_a_gpu(dtype, masked, kernel):
    model = models.llama(num_key_value_heads=2).to(getattr(torch, dtype))
    inputs = models.batch(seq_length=64)
    if masked:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"]).tril_(0)
    graph = memopt.analyze(model, inputs, target_device="cuda")
    ops = {t.op for t in graph.saved if t.op.startswith("ScaledDotProduct")}
    assert ops == ({f"ScaledDotProduct{kernel}Attention"} if kernel else set())


def test_a_model_that_needs_data_is_an_error_with_a_way_out():
    class Peeking(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return x * self.inner(x).sum().item()

    way_out = (
        r"its forward asks for the values of a tensor \(\S+\) in test_trace.py:135; analyze it with .*without labels"
    )
    with pytest.raises(TraceError, match=way_out):
        memopt.analyze(Peeking(), torch.randn(2, 4))


@pytest.mark.parametrize("weights", [None, torch.float32, torch.float16])
def test_counts_of_a_healthy_run_have_the_length_asked_for(weights):
    seen = []

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(4, 4)

        def forward(self, x):
            scores = self.gate(x)
            weighed = None if weights is None else scores[:, 0].detach().to(weights)
            counts = torch.bincount(scores.argmax(-1), weighed, minlength=4)
            seen.append((counts.shape, counts.dtype))
            return (scores * counts).sum()

    Routed()(torch.randn(6, 4))
    memopt.analyze(Routed(), torch.randn(6, 4))
    assert seen[0] == seen[1]


def test_counts_of_known_values_are_as_many_as_they_are():
    class Grouped(nn.Module):
        def forward(self, x, groups):
            return (x.exp() * torch.bincount(groups, minlength=2)).sum()

    inputs = {"x": torch.randn(5, requires_grad=True), "groups": torch.tensor([0, 4])}
    assert [t.shape for t in memopt.analyze(Grouped(), inputs).saved] == [(5,)] * 2


def test_counts_of_no_known_length_are_an_error():
    class Routed(nn.Module):
        def forward(self, x):
            return x.exp() * torch.bincount(x.argmax(-1)).sum()

    with pytest.raises(TraceError, match=r"asks for the values of a tensor \(aten\.bincount\.default\)"):
        memopt.analyze(Routed(), torch.randn(2, 4, requires_grad=True))


def test_tables_of_a_live_model_are_known():
    class Hashing(nn.Module):
        """Its experts are chosen by a table of words, as those of DeepSeek-V4's first layers are."""

        def __init__(self):
            super().__init__()
            self.register_buffer("expert_of", torch.tensor([0, 2, 2]))

        def forward(self, x, ids):
            return x[self.expert_of[ids] == 2].exp()

    inputs = {"x": torch.randn(4, 8, requires_grad=True), "ids": torch.tensor([0, 1, 2, 2])}
    assert [t.shape for t in memopt.analyze(Hashing(), inputs).saved if t.op == "Exp"] == [(3, 8)]


class Routed(nn.Module):
    """Experts in a loop over those that a router chose, by masks, numbers and bounds that follow from its choices."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.gate(x).topk(2)
        self.ends = torch.nn.functional.one_hot(chosen, 4).sum((0, 1)).cumsum(0)
        out = torch.zeros_like(x)
        for (index,) in torch.nn.functional.one_hot(chosen, 4).sum((0, 1)).nonzero():
            rows = (chosen == index).any(-1)
            out[rows] = self.experts[int(index)](x[rows]) * weights[rows, :1]
        return out + x[: self.ends[0]].exp().sum() * x[index]


def test_routers_are_taken_to_choose_evenly_where_a_trace_asks_for_their_choices():
    inputs = torch.randn(6, 8, requires_grad=True)
    graph = memopt.analyze(Routed(), inputs)
    rows = {t.owner: t.shape[0] for t in graph.saved if t.owner.startswith("experts") and t.field == "mat1"}
    assert rows == {f"experts.{number}": 3 for number in range(4)}
    assert [t.shape for t in graph.saved if t.op == "Exp"] == [(3, 8)]
    assert "routers to choose evenly" in "".join(graph.notes)


@pytest.mark.parametrize("keepdim", [True, False])
def test_a_router_that_chooses_one_expert_by_its_maximum_is_balanced_too(keepdim):
    class Single(nn.Module):
        def forward(self, x):
            _, chosen = x.max(dim=-1, keepdim=keepdim)
            return x[chosen.flatten() == 1].exp()

    graph = memopt.analyze(Single(), torch.randn(6, 3, requires_grad=True))
    assert [t.shape for t in graph.saved if t.op == "Exp"] == [(2, 3)]


def test_nothing_is_said_of_choices_that_no_shape_depends_on():
    class Weighed(nn.Module):
        def forward(self, x):
            return x.topk(2).values.exp()

    assert memopt.analyze(Weighed(), torch.randn(6, 8, requires_grad=True)).notes == ()


class Guarded(nn.Module):
    """Branches of an ordinary run: guards against bad numbers, chance, and lengths read off the inputs."""

    def __init__(self):
        super().__init__()
        self.layer, self.dropped = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, lengths):
        if torch.isnan(x).any() or torch.isinf(x).any() or not torch.isfinite(x).all():
            raise ValueError("bad numbers")
        if torch.rand([]) < 0.1:
            return self.dropped(x)
        longest = int(lengths.max())
        rows = torch.nonzero(lengths > 1).flatten()
        mask = torch.zeros(x.shape[0], dtype=torch.bool)
        mask[rows] = True
        return self.layer(x[: lengths.tolist()[0]]).tanh() * longest if mask.any() else x


def test_branches_on_values_of_the_inputs_are_the_real_ones():
    graph = memopt.analyze(Guarded(), {"x": torch.randn(4, 8), "lengths": torch.tensor([3, 1, 2, 2])})
    assert [(t.owner, t.op, t.shape[0]) for t in graph.saved] == [("layer", "Addmm", 3), ("", "Tanh", 3)]


def test_a_forgotten_value_is_not_a_wrong_one():
    class Overwriting(nn.Module):
        def forward(self, x, flags):
            flags = flags.clone()
            flags[0] = x.sum() > 0
            return x.exp() if flags.all() else x

    with pytest.raises(TraceError, match="asks for the values"):
        memopt.analyze(
            Overwriting(), {"x": torch.randn(4, requires_grad=True), "flags": torch.ones(3, dtype=torch.bool)}
        )


def test_chance_is_not_moved():
    model, inputs = Guarded(), {"x": torch.randn(4, 8), "lengths": torch.tensor([3, 1, 2, 2])}
    before = torch.get_rng_state()
    memopt.analyze(model, inputs)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_compiled_model_is_refused_and_a_compiled_part_is_traced_as_it_was_written():
    model, inputs = models.llama(num_hidden_layers=1), models.batch(seq_length=8)
    plain = memopt.analyze(model, inputs)
    with pytest.raises(GraphCompileError, match="LlamaForCausalLM"):
        memopt.analyze(torch.compile(model, backend="eager"), inputs)
    model.model.layers[0].mlp.compile(backend="eager")
    assert memopt.analyze(model, inputs).saved == plain.saved
    assert model.model.layers[0].mlp._compiled_call_impl is not None


def test_a_batch_that_fits_no_memory_costs_none():
    graph = memopt.analyze(preset("tiny-llama"), batch_size=4096, seq_length=4096, dtype="float32")
    assert graph.input.batch_size == 4096
    assert memopt.ir.saved_bytes(graph.saved).activation_bytes > 1 << 40


def test_wrong_requests_name_the_legal_values():
    model = nn.Linear(4, 4)
    with pytest.raises(IllegalValueError, match="autocast='int8'.*none, bfloat16, float16"):
        memopt.analyze(model, torch.randn(2, 4), autocast="int8")
    with pytest.raises(RequestError, match="takes no input_ids"):
        memopt.analyze(model)


def test_a_rewritten_model_is_traced_as_the_model_it_was():
    model, inputs = models.llama(), models.batch(seq_length=512)
    before = memopt.analyze(model, inputs)
    memopt.apply(model, {"activation_swap": "attention"}, inputs)
    assert memopt.analyze(model, inputs) == before


# what fake tensors cannot do


class Broken(nn.Module):
    """Two layers, the second of which does as it is told."""

    def __init__(self, do):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), Doing(do))

    def forward(self, x):
        return self.layers(x)


class Doing(nn.Module):
    def __init__(self, do):
        super().__init__()
        self.do = do

    def forward(self, x):
        return self.do(x)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "do",
    [
        lambda x: x @ torch.ones(5, 5),
        lambda x: torch.nested.nested_tensor([x, x]),
        lambda x: x.as_subclass(Subclass).sin(),
        lambda x: x.nothing,
        lambda x: {}["key"],
    ],
)
def test_whatever_goes_wrong_names_the_module_in_one_line(do):
    with pytest.raises(
        TraceError, match=r"^Broken cannot be traced: 'layers\.1' raises \w+: .+; if it runs on real"
    ) as e:
        memopt.analyze(Broken(do), torch.randn(2, 4))
    assert "hook" not in str(e.value)
    assert "\n" not in str(e.value)
    assert e.value.__cause__ is not None


def test_torch_prints_no_traceback_of_a_failing_trace_and_prints_again_after_it():
    logger, records = logging.getLogger("torch._subclasses.fake_tensor"), []
    handler = logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    try:
        with pytest.raises(TraceError):
            memopt.analyze(Broken(lambda x: x @ torch.ones(5, 5)), torch.randn(2, 4))
        assert records == []
        with FakeTensorMode(), pytest.raises(RuntimeError):
            torch.ones(2, 4) @ torch.ones(5, 5)
        assert records
    finally:
        logger.removeHandler(handler)


def test_arguments_that_do_not_fit_name_the_model():
    with pytest.raises(
        TraceError, match=r"^Linear cannot be traced: its forward raises TypeError: .*unexpected keyword"
    ):
        memopt.analyze(nn.Linear(4, 4), {"x": torch.randn(2, 4)})


def test_hooks_are_not_called_and_an_error_says_so():
    model = Broken(lambda x: x.sin())
    model.layers[1].do = lambda x: model.layers[0].out.sin()
    model.layers[0].register_forward_hook(lambda module, args, out: setattr(module, "out", out))
    with pytest.raises(
        TraceError, match=r"'layers\.1' raises AttributeError: .*what a hook should do: a trace calls none"
    ):
        memopt.analyze(model, torch.randn(2, 4))


@pytest.mark.parametrize(
    ("argument", "what"),
    [
        (torch.ones(2, 4, device="meta"), r"\(Tensor, torch.float32, torch.strided, on meta\)"),
        ((number for number in range(3)), "of type generator"),
    ],
)
def test_an_argument_that_cannot_be_copied_is_named(argument, what):
    with pytest.raises(TraceError, match=f"^an argument {what} cannot be copied, .*inputs that leave it out$"):
        memopt.analyze(Broken(torch.sin), (argument,))


@pytest.mark.parametrize(
    "wrapped",
    [lambda x: type("Pair", (tuple,), {})((x, x)), lambda x: deque([x]), lambda x: type("Own", (dict,), {})({0: x})],
)
def test_a_layer_may_be_called_with_odd_containers(wrapped):
    graph = memopt.analyze(Broken(lambda x: wrapped(x)[0].sin()), (torch.randn(2, 4),))
    assert [t.op for t in graph.saved if t.kind is Kind.ACTIVATION] == ["Addmm", "Sin"]


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_sparse_tensors_are_left_out_with_a_note(layout):
    graph = memopt.analyze(
        Broken(lambda x: torch.sparse.mm(getattr(torch.eye(2), layout)(), x).sin()), torch.randn(2, 4)
    )
    assert [t.op for t in graph.saved if t.kind is Kind.ACTIVATION] == ["Addmm", "Sin"]
    (note,) = graph.notes
    assert note.startswith("1 saved tensor without a storage of their own (sparse)")


def test_a_sparse_parameter_counts_no_bytes():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4).to_sparse())

        def forward(self, x):
            return torch.sparse.mm(self.weight, x.t())

    assert memopt.analyze(Sparse(), torch.randn(2, 4)).model.parameter_bytes == 0


def test_what_cannot_be_copied_is_named():
    model = Broken(torch.sin)
    model.layers[1].noise = random.SystemRandom()
    with pytest.raises(TraceError, match=r"needs: 'layers\.1\.noise', a SystemRandom, refuses .*; take that off or"):
        memopt.analyze(model, torch.randn(2, 4))


def test_a_model_of_images_and_words_is_traced_on_words_alone():
    graph = memopt.analyze(zoo.ZOO["qwen2_5_vl"]())
    assert (graph.input.batch_size, graph.input.seq_length) == (1, 1024)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_modules_inside_of_torchs_checkpoint_are_noted(use_reentrant):
    class Checkpointing(Broken):
        def forward(self, x):
            with torch.no_grad():
                x = self.layers[0](x) + x
            return checkpoint(self.layers[1], self.layers[0](x), use_reentrant=use_reentrant)

    assert memopt.analyze(Checkpointing(torch.sin), torch.randn(2, 4)).checkpointed == ("layers.1",)


def test_a_trace_draws_no_random_number_of_the_program():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x) + torch.rand(4) if random.random() + numpy.random.rand() > 0.5 else x
            return x

    def states():
        return random.getstate(), numpy.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()

    model, x = Dropping(), torch.randn(2, 4)
    before = states()
    memopt.analyze(model, x)
    assert states() == before
