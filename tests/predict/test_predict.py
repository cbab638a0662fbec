"""What memopt.predict says of a training step, and that it says no more than it knows."""

import gc
import pickle

import pytest
import torch
from torch import nn

import memopt
from memopt.analyze.flops import flops_of
from memopt.errors import IllegalValueError, PlanMismatchError, PredictionError, RequestError
from memopt.ir import DEVICES, Phase, Use
from memopt.predict.mode import CountingMode
from tests import zoo

SWAP = {"activation_swap": "attention"}
GIB = 1 << 30


def memory_of(name="llama", config=None, **options):
    model, inputs = zoo.ZOO[name](), zoo.batch(name, use_cache=False)
    graph = memopt.analyze(model, inputs, target_device="cuda")
    return model, memopt.predict(memopt.plan(graph, config), model, inputs, **options)


def bytes_of(model):
    """Return what the trained parameters take, each in blocks of 512 bytes."""
    return sum(-(-p.untyped_storage().nbytes() // 512) * 512 for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(("optimizer", "copies"), [("none", 0), ("sgd", 0), ("adamw", 2), ("adamw-fused", 2)])
def test_gradients_stay_and_optimizers_keep_their_state(optimizer, copies):
    model, memory = memory_of(optimizer=optimizer)
    step, size = memory.baseline, bytes_of(model)
    counts = 512 * len(list(model.parameters())) if optimizer == "adamw-fused" else 0
    assert step.most_for(Use.GRADIENTS) == size
    assert step.most_for(Use.OPTIMIZER) == copies * size + counts
    assert step.most_for(Use.LIBRARIES) == DEVICES["h200"].library_bytes


def test_adamw_makes_copies_of_all_parameters_in_its_step():
    model, memory = memory_of(optimizer="adamw")
    _, fused = memory_of(optimizer="adamw-fused")

    def most_in_step(memory):
        return max(
            (m.bytes_for(Use.WORKSPACE) for m in memory.baseline.moments if m.phase is Phase.OPTIMIZER), default=0
        )

    assert most_in_step(memory) - most_in_step(fused) == pytest.approx(bytes_of(model), rel=0.01)


@pytest.mark.parametrize("optimizer", ["none", "adamw-fused"])
def test_gradients_that_are_used_in_backward_do_not_add_up(optimizer):
    model, memory = memory_of(optimizer=optimizer, grad_in_backward=True)
    largest = max(p.untyped_storage().nbytes() for p in model.parameters())
    assert 0 < memory.baseline.most_for(Use.GRADIENTS) <= largest + 512


def test_frozen_parameters_have_neither_gradients_nor_state():
    model, inputs = zoo.ZOO["llama"](), zoo.batch("llama", use_cache=False)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(True)
    graph = memopt.analyze(model, inputs)
    memory = memopt.predict(memopt.plan(graph), model, inputs, optimizer="adamw")
    assert memory.baseline.most_for(Use.GRADIENTS) == bytes_of(model)
    assert memory.baseline.most_for(Use.OPTIMIZER) == 2 * bytes_of(model)


def test_a_plan_without_copies_has_one_peak_and_one_with_copies_an_interval(monkeypatch):
    monkeypatch.setattr("memopt.ir.policy.MIN_SWAP_TENSOR_BYTES", 1)
    _, full = memory_of(config={"activation_checkpoint": "full"}, optimizer="sgd")
    assert len(full.planned) == 1
    assert full.planned_low_bytes == full.planned_high_bytes < full.baseline.peak.total_bytes
    assert full.copied_out_bytes == full.host_pinned_bytes == 0
    _, swap = memory_of(config=SWAP)
    assert len(swap.planned) == 2
    assert swap.planned_low_bytes <= swap.planned_high_bytes
    assert swap.copied_out_bytes >= swap.copied_in_bytes > 0
    assert swap.host_pinned_bytes >= swap.copied_out_bytes


def test_what_is_in_use_at_the_peak_adds_up_to_it():
    _, memory = memory_of("qwen3_moe", {"activation_checkpoint": "selective"})
    for step in (memory.baseline, *memory.planned):
        assert sum(step.peak.uses) == step.peak.total_bytes == max(m.total_bytes for m in step.moments)


def test_it_fits_or_it_does_not():
    _, memory = memory_of()
    peak = memory.planned_high_bytes
    assert memory.fits is None
    assert memory_of(device_memory_bytes=peak)[1].fits is True
    assert memory_of(device_memory_bytes=peak - 1)[1].fits is False


def test_the_live_model_is_not_touched():
    model, inputs = zoo.ZOO["llama"](), zoo.batch("llama", use_cache=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    plan = memopt.plan(memopt.analyze(model, inputs), {"activation_checkpoint": "full"})
    memopt.predict(plan, model, inputs, optimizer="adamw")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(p.grad is not None or p._post_accumulate_grad_hooks for p in model.parameters())


def test_an_unknown_optimizer_is_named():
    with pytest.raises(IllegalValueError, match="optimizer='lion'.*none, sgd, adamw, adamw-fused"):
        memory_of(optimizer="lion")


class ReadsItsGradient(torch.autograd.Function):
    """A function whose backward looks at values, which a prediction has not."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad if float(grad.sum()) > 0 else -grad


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return ReadsItsGradient.apply(self.weight * x)


def test_a_step_that_fake_tensors_cannot_take_is_an_error_that_says_so_and_pickles():
    model, x = Reader(), torch.ones(4)
    plan = memopt.plan(memopt.analyze(model, x))
    with pytest.raises(PredictionError, match="Reader cannot be predicted.*--no-predict") as caught:
        memopt.predict(plan, model, x)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_backward_of_attention_counts_what_torch_counts():
    from torch.utils.flop_counter import sdpa_backward_flop_count

    query, value, grad = torch.empty(2, 4, 16, 8), torch.empty(2, 4, 24, 6), torch.empty(2, 4, 16, 6)
    key = torch.empty(2, 4, 24, 8)
    counted = flops_of(
        torch.ops.aten._scaled_dot_product_flash_attention_backward.default, (grad, query, key, value), {}, ()
    )
    assert counted == sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


def test_gradients_of_earlier_batches_are_there_from_the_start():
    model, alone = memory_of(optimizer="none")
    _, later = memory_of(optimizer="none", accumulate_gradients=True)
    gained = later.baseline.peak.bytes_for(Use.GRADIENTS) - alone.baseline.peak.bytes_for(Use.GRADIENTS)
    assert later.baseline.moments[0].bytes_for(Use.GRADIENTS) == bytes_of(model) >= gained > 0
    with pytest.raises(RequestError, match="do not accumulate"):
        memory_of(grad_in_backward=True, accumulate_gradients=True)


class Partly(nn.Module):
    """A model of which one part never has a gradient, though it could."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x):
        with torch.no_grad():
            x = self.unused(x)
        return self.used(x)


@pytest.mark.parametrize("options", [{}, {"accumulate_gradients": True}, {"grad_in_backward": True}], ids=str)
def test_parameters_without_a_gradient_have_no_state(options):
    model, x = Partly(), torch.ones(4, 256)
    memory = memopt.predict(memopt.plan(memopt.analyze(model, x)), model, x, optimizer="adamw", **options)
    used = 256 * 256 * 4 + 256 * 4
    assert memory.baseline.most_for(Use.OPTIMIZER) == 2 * used
    assert memory.baseline.most_for(Use.GRADIENTS) <= used


def test_a_rewritten_model_is_not_predicted():
    model, inputs = zoo.ZOO["llama"](), zoo.batch("llama", use_cache=False)
    plan = memopt.plan(memopt.analyze(model, inputs), {"activation_checkpoint": "full"})
    memopt.apply(model, plan)
    with pytest.raises(RequestError, match="rewritten already.*memopt.undo"):
        memopt.predict(plan, model, inputs)


@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad, torch.inference_mode,
        torch.autograd.detect_anomaly,
    ],
    ids=["autocast", "no_grad", "inference_mode", "anomalies"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_what_is_switched_on_around_changes_nothing(around):
    model, inputs = zoo.ZOO["llama"](), zoo.batch("llama", use_cache=False)
    plan = memopt.plan(memopt.analyze(model, inputs), {"activation_checkpoint": "full"})
    plain = memopt.predict(plan, model, inputs)
    with around():
        assert memopt.predict(plan, model, inputs) == plain


def test_hooks_for_saved_tensors_around_a_prediction_are_refused():
    model, inputs = zoo.ZOO["llama"](), zoo.batch("llama", use_cache=False)
    plan = memopt.plan(memopt.analyze(model, inputs))
    with torch.autograd.graph.save_on_cpu(), pytest.raises(RequestError, match="call it outside"):
        memopt.predict(plan, model, inputs)


def test_hooks_of_the_model_are_told_of():
    model, inputs = zoo.ZOO["llama"](), zoo.batch("llama", use_cache=False)
    plan = memopt.plan(memopt.analyze(model, inputs))
    assert memopt.predict(plan, model, inputs).notes == ()
    model.enable_input_require_grads()
    assert "forward hooks" in memopt.predict(plan, model, inputs).notes[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "b300"}, "device_profile='b300'"),
        ({"device": 3}, "device='int'"),
        ({"device_memory_bytes": "80GiB"}, "device_memory_bytes='80GiB'"),
        ({"device_memory_bytes": -1}, "device_memory_bytes=-1"),
    ],
)
def test_odd_options_are_named(options, message):
    with pytest.raises(IllegalValueError, match=message):
        memory_of(**options)


@pytest.mark.parametrize("plan", [None, {"activation_checkpoint": "full"}], ids=str)
def test_a_plan_is_a_plan(plan):
    with pytest.raises(IllegalValueError, match="a Plan, as memopt.plan"):
        memopt.predict(plan, Partly(), torch.ones(4, 256))


def test_a_plan_of_another_model_is_refused():
    model, inputs = zoo.ZOO["llama"](), zoo.batch("llama", use_cache=False)
    plan = memopt.plan(memopt.analyze(Partly(), torch.ones(4, 256)))
    with pytest.raises(PlanMismatchError, match="made for Partly"):
        memopt.predict(plan, model, inputs)


class Silent(nn.Linear):
    def forward(self, x):
        super().forward(x)


def test_a_model_that_returns_nothing_is_told_of():
    model, x = Silent(4, 4), torch.ones(2, 4)
    with pytest.raises(RequestError, match="returns no tensor"):
        memopt.predict(memopt.plan(memopt.analyze(model, x)), model, x)


def test_nothing_of_a_prediction_stays():
    for _ in range(2):
        memory_of(optimizer="adamw-fused", grad_in_backward=True)
        gc.collect()
        assert not [thing for thing in gc.get_objects() if type(thing) is CountingMode]
