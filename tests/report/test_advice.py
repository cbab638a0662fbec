"""Each sentence of advice: with its number where the prediction calls for it, and absent where it does not."""

import pytest

from memopt.ir import Phase
from memopt.passes import FineGrainedOffload, Pipeline
from memopt.report import advice_of
from memopt.report.advice import (
    few_activations_sentence,
    fixed_sentence,
    host_sentence,
    inflight_sentence,
    loss_sentence,
    optimizer_sentence,
    room_sentence,
    tight_sentence,
    unreached_sentence,
    window_sentence,
)
from tests.builders import (
    GIB,
    LOSS,
    Plan,
    graph_of,
    memory_of,
    mib_save,
    moe_layers,
    moment_of,
    plan_of,
    step_of,
    usual_step,
)

NO_PLAN = Plan(graph=graph_of(mib_save("model.layers.0.self_attn", 1024)))
SWAP = plan_of(*(mib_save(f"model.layers.{layer}.self_attn", 4096) for layer in range(6)))
"""It frees 20 GiB: the last of six layers is margin."""


def offload(**options):
    saves, build = moe_layers(4)
    pass_ = FineGrainedOffload(modules=("core_attn", "attn_proj"), min_tensor_elements=1000, **options)
    return Pipeline([pass_]).run(Plan(graph=graph_of(*saves, build=build)))


def swapped(*, low=20, high=22, **options):
    return memory_of(usual_step(), usual_step(activations=low), usual_step(activations=high), **options)


def test_a_plan_that_does_its_work_gets_no_advice():
    memory = memory_of(usual_step(logits=0.5), usual_step(activations=20, logits=0.4), copied_gib=4, device_gib=80)
    assert advice_of(SWAP, memory) == ()


def test_parameters_gradients_and_state_are_most():
    text = fixed_sentence(NO_PLAN, memory_of(usual_step(activations=10)))
    assert text.startswith("Parameters, gradients and optimizer state take 20.00 GiB when all of them are there")
    assert "no plan of activations brings the peak of 33.00 GiB below that." in text
    assert "--grad-in-backward drops 5.00 GiB of gradients" in text
    assert "an 8-bit optimizer (its state takes 10.00 GiB now); LoRA; sharding" in text
    assert "alone" not in text


def test_what_is_off_already_is_no_remedy():
    text = fixed_sentence(NO_PLAN, memory_of(usual_step(activations=2, state=0), grad_in_backward=True))
    assert text.endswith("What lowers that: LoRA; sharding over several devices (FSDP).")


def test_who_trains_little_is_told_nothing_of_lora():
    memory = memory_of(step_of(moment_of(0, parameters=20, gradients=1)))
    assert "LoRA" not in fixed_sentence(NO_PLAN, memory)


def test_they_do_not_fit_alone():
    memory = memory_of(usual_step(), device_gib=18)
    assert "They alone are short by 2.00 GiB." in fixed_sentence(NO_PLAN, memory)
    assert room_sentence(NO_PLAN, memory) == ""


def test_they_are_not_most():
    assert fixed_sentence(NO_PLAN, memory_of(usual_step(), device_gib=20)) == ""


def test_there_are_few_activations():
    text = few_activations_sentence(SWAP, memory_of(usual_step(activations=2), usual_step(activations=1)))
    assert text.startswith("Activations take no more than 2.00 GiB, 8% of the peak, at 1 x 1024 tokens")


@pytest.mark.parametrize(("plan", "activations"), [(NO_PLAN, 2), (SWAP, 5)])
def test_there_are_not_few_activations_or_there_is_no_plan(plan, activations):
    assert few_activations_sentence(plan, memory_of(usual_step(activations=activations))) == ""


def test_the_logits_make_the_peak():
    text = loss_sentence(NO_PLAN, memory_of(usual_step()))
    assert text.startswith(
        "The logits make the peak, 6.50 GiB above all that has nothing to do with them: that reaches "
    )
    assert "56.50 GiB, in backward of model.layers.1.mlp (MmBackward0)." in text
    assert "use_liger_kernel=True" in text


@pytest.mark.parametrize(("device_gib", "fits"), [(56, False), (57, True), (62, True), (63, False)])
def test_whether_it_fits_without_the_logits_where_it_does_not_with_them(device_gib, fits):
    text = loss_sentence(NO_PLAN, memory_of(usual_step(), device_gib=device_gib))
    assert ("that reaches 56.50 GiB (which fits), in backward" in text) == fits


def test_the_logits_make_the_peak_of_a_model_that_has_no_modules():
    own = moment_of(0, phase=Phase.FORWARD, module="", op="aten.mm", activations=1)
    text = loss_sentence(NO_PLAN, memory_of(step_of(own, moment_of(1, **LOSS, activations=2))))
    assert text.startswith("The logits make the peak. No plan")


@pytest.mark.parametrize(
    "where",
    [{}, {"op": LOSS["op"]}, {"phase": Phase.OPTIMIZER, "module": "", "op": "aten.mul"}],
    ids=["layer", "log_softmax of a layer", "optimizer"],
)
def test_something_else_makes_the_peak(where):
    assert loss_sentence(NO_PLAN, memory_of(step_of(moment_of(0, **where, activations=1)))) == ""


def optimizing(workspace):
    return step_of(
        moment_of(0, phase=Phase.FORWARD, op="aten.mm", parameters=5),
        moment_of(9, phase=Phase.OPTIMIZER, module="", op="aten._foreach_sqrt", parameters=5, workspace=workspace),
    )


def test_the_optimizer_makes_the_peak():
    text = optimizer_sentence(NO_PLAN, memory_of(optimizing(3), optimizer="adamw"))
    assert "AdamW makes 3.00 GiB of temporary tensors there" in text
    assert "--optimizer adamw-fused" in text


def test_a_fused_optimizer_is_told_nothing_of_the_fused_one():
    text = optimizer_sentence(NO_PLAN, memory_of(optimizing(0.1), optimizer="adamw-fused"))
    assert text.endswith("where 0 B of activations are left: no plan of activations lowers it.")


def test_the_optimizer_does_not_make_the_peak():
    assert optimizer_sentence(NO_PLAN, memory_of(usual_step(), optimizer="adamw")) == ""


@pytest.mark.parametrize(
    ("left", "text"),
    [(26, "the peak falls by 14.00 GiB only"), (40, "the peak does not fall"), (41, "the peak does not fall")],
)
def test_what_the_plan_frees_does_not_reach_the_peak(left, text):
    sentence = unreached_sentence(SWAP, swapped(low=left, high=left))
    assert sentence.startswith(f"The plan frees 20.00 GiB between forward and backward, but {text}: ")
    assert "in backward of the loss (LogSoftmaxBackward0)" in sentence


@pytest.mark.parametrize(("plan", "left"), [(SWAP, 25), (NO_PLAN, 40)])
def test_what_the_plan_frees_reaches_the_peak(plan, left):
    assert unreached_sentence(plan, swapped(low=left, high=left)) == ""


def test_copies_on_their_way_hold_the_peak_up():
    assert inflight_sentence(offload(), swapped(high=30)).startswith(
        "Copies that are still on their way hold up to 10.00 GiB at the peak. What helps: max_inflight: 1"
    )


@pytest.mark.parametrize(
    ("plan", "high"), [(offload(), 25), (offload(max_inflight=1), 30), (SWAP, 30)], ids=["little", "limited", "swap"]
)
def test_copies_on_their_way_hold_little_or_cannot_be_limited(plan, high):
    assert inflight_sentence(plan, swapped(high=high)) == ""


def test_copies_take_longer_than_forward():
    text = window_sentence(SWAP, swapped(copied_gib=20))
    assert text.startswith(
        "Copies out take up to 288 ms longer than the forward that hides them, which is predicted to"
    )
    fits = int(0.1 * 55.3e9)
    assert f"margin_bytes={4 * GIB + 20 * GIB - fits}," in text


@pytest.mark.parametrize(("now", "then"), [(1.0, 0.25), (0.8, 0.2)])
def test_copies_of_an_offload_take_longer_than_forward(now, then):
    text = window_sentence(offload(fraction=now), swapped(copied_gib=20))
    assert f"5.15 GiB of the 20.00 GiB fit: fraction: {then} in activation_offload" in text


def test_copies_fit_into_forward():
    assert window_sentence(SWAP, swapped(copied_gib=5)) == ""


def test_the_host_needs_much_memory():
    assert "The copies lie in 40.00 GiB of pinned host memory" in host_sentence(SWAP, swapped(pinned_gib=40))
    assert host_sentence(SWAP, swapped(pinned_gib=32)) == ""


def test_a_plan_may_make_it_fit():
    text = room_sentence(NO_PLAN, memory_of(usual_step(), device_gib=48))
    assert text.startswith("Activations take 40.00 GiB of the peak, and 15.00 GiB are missing: a plan may make it fit.")


def test_no_plan_makes_it_fit():
    text = room_sentence(NO_PLAN, memory_of(usual_step(activations=3, logits=20), device_gib=30))
    assert text.startswith("The peak would be short by 5.00 GiB even without its 3.00 GiB of activations")


@pytest.mark.parametrize(("plan", "device_gib"), [(SWAP, 48), (NO_PLAN, None), (NO_PLAN, 63)])
def test_it_fits_or_there_is_a_plan(plan, device_gib):
    assert room_sentence(plan, memory_of(usual_step(), device_gib=device_gib)) == ""


def test_what_fits_narrowly_may_still_fail():
    text = tight_sentence(NO_PLAN, memory_of(usual_step(), device_gib=64))
    assert text.startswith("It fits by 1.00 GiB, and may still fail")


@pytest.mark.parametrize("device_gib", [None, 62, 72])
def test_what_fits_well_or_not_at_all_is_no_narrow_matter(device_gib):
    assert tight_sentence(NO_PLAN, memory_of(usual_step(), device_gib=device_gib)) == ""
