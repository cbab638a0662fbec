"""The memory of a training step as it is read, and that its printed numbers add up."""

import json
import re

import pytest

from memopt.ir import DEVICES, Phase
from memopt.report import plan_report, plan_summary, rendered
from memopt.report.places import place_text
from tests.builders import GIB, LOSS, QWEN, Plan, graph_of, memory_of, moment_of, plan_of, qwen_layers, usual_step

SECTION = re.compile(
    r"^Memory of a training step, predicted .*?(?=\n\n[A-Z][a-z ]+ \u2500{5})", re.MULTILINE | re.DOTALL
)
MEMORY_KEYS = [
    "parameter_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "baseline_peak_bytes",
    "planned_peak_low_bytes",
    "planned_peak_high_bytes",
    "peak_at",
    "host_pinned_bytes",
    "fits",
    "optimizer",
    "grad_in_backward",
    "accumulate_gradients",
    "baseline_peak_at",
    "activation_bytes",
    "workspace_bytes",
    "library_bytes",
    "copied_out_bytes",
    "copied_in_bytes",
    "copy_out_us",
    "copy_in_us",
    "forward_us",
    "backward_us",
    "device",
    "device_memory_bytes",
    "short_bytes",
    "notes",
]


def swapped(**options):
    """Return the prediction of a swap that takes 20 GiB off the loss, or 18 GiB while copies are on their way."""
    return memory_of(usual_step(), usual_step(activations=20), usual_step(activations=22), copied_gib=20, **options)


def section(memory, plan=None):
    plan = plan or plan_of(*qwen_layers(4), build=QWEN)
    return SECTION.search(rendered(plan_report(plan, memory)))[0] + "\n"


def test_a_swap_that_fits(golden):
    plan = plan_of(*qwen_layers(4), build=QWEN)
    assert rendered(plan_report(plan, swapped(device_gib=48))) == golden


def test_no_plan_that_does_not_fit(golden):
    memory = memory_of(usual_step(), device_gib=48, grad_in_backward=True, optimizer="sgd", device=DEVICES["a100"])
    assert section(memory, Plan(graph=graph_of(*qwen_layers(4), build=QWEN))) == golden


def test_checkpointing_moves_the_peak(golden):
    assert section(memory_of(usual_step(), usual_step(activations=4, logits=1), device_gib=24)) == golden


def test_as_json(golden_json):
    plan = plan_of(*qwen_layers(1), build=QWEN)
    assert json.dumps(plan_summary(plan, swapped(device_gib=48))["memory"], indent=2) + "\n" == golden_json


def test_the_json_has_the_contracts_keys_and_only_if_predicted():
    plan = plan_of(*qwen_layers(1), build=QWEN)
    assert list(plan_summary(plan, swapped())["memory"]) == MEMORY_KEYS
    without = plan_summary(plan)
    assert "memory" not in without
    assert {key: value for key, value in plan_summary(plan, swapped()).items() if key != "memory"} == without


def test_the_section_stands_for_the_one_on_copy_time():
    plan = plan_of(*qwen_layers(2), build=QWEN)
    text, without = rendered(plan_report(plan, swapped())), rendered(plan_report(plan))
    copy_time = re.search(r"^Copy time .*?(?=\n\nTargets)", without, re.MULTILINE | re.DOTALL)[0]
    assert text.replace(SECTION.search(text)[0], copy_time) == without


@pytest.mark.parametrize(
    ("device_gib", "fits", "texts"),
    [
        (None, None, []),
        (70, True, ["fits, 7.00 GiB to spare", "fits, 25.00 GiB to spare"]),
        (45, True, ["short by 18.00 GiB", "fits, 0 B to spare"]),
        (44, False, ["short by 19.00 GiB", "short by up to 1.00 GiB"]),
        (40, False, ["short by 23.00 GiB", "short by 5.00 GiB"]),
    ],
)
def test_whether_it_fits(device_gib, fits, texts):
    memory = swapped(device_gib=device_gib)
    assert re.findall(r"(?:fits|short by)[^-]*?(?:spare|iB)(?= {2}|\n)", section(memory)) == texts
    values = plan_summary(plan_of(*qwen_layers(1), build=QWEN), memory)["memory"]
    assert values["fits"] is fits
    if device_gib is not None:
        missing = {"baseline": 63, "planned": 45}
        assert values["short_bytes"] == {key: max(0, gib - device_gib) * GIB for key, gib in missing.items()}


def test_the_printed_uses_add_up_to_the_printed_peak():
    lines = section(memory_of(usual_step(), usual_step(activations=7))).splitlines()
    rows = [re.findall(r"([\d.]+) (GiB|B)", line)[:2] for line in lines[3:10] if line.strip()]
    columns = [[float(number) for number, _ in column] for column in zip(*rows, strict=True)]
    assert [sum(column[:-1]) for column in columns] == [column[-1] for column in columns] == [63, 30]


def test_without_copies_nothing_is_said_of_them():
    text = section(memory_of(usual_step(), usual_step(activations=7)))
    assert not re.search("pinned|copies (out|in) |\\.\\.", text)


@pytest.mark.parametrize(
    ("where", "text"),
    [
        (LOSS, "backward of the loss (LogSoftmaxBackward0)"),
        ({"phase": Phase.FORWARD, "module": "", "op": "aten._log_softmax"}, "forward of the loss (aten._log_softmax)"),
        ({"module": "criterion", "op": "NllLossBackward0 aten.nll_loss_backward"},
         "backward of the loss (NllLossBackward0)"),
        ({"module": "model.router", "op": "LogSoftmaxBackward0 aten._log_softmax_backward_data"},
         "backward of model.router (LogSoftmaxBackward0)"),
        ({}, "backward of model.layers.0.mlp (MmBackward0)"),
        ({"phase": Phase.FORWARD, "op": "aten.mm"}, "forward of model.layers.0.mlp (aten.mm)"),
        ({"op": "aten.mm"}, "backward, where model.layers.0.mlp runs again (aten.mm)"),
        ({"module": "", "op": "MulBackward0 aten.mul"}, "backward of the model's own forward (MulBackward0)"),
        ({"module": "", "op": "torch::autograd::AccumulateGrad aten.detach"},
         "backward, where a parameter gets its gradient (aten.detach)"),
        ({"phase": Phase.OPTIMIZER, "module": "", "op": "aten._foreach_sqrt"},
         "the optimizer's step (aten._foreach_sqrt)"),
    ],
)  # fmt: skip
def test_a_place_in_words(where, text):
    assert place_text(moment_of(0, **where)) == text
