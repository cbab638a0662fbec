"""The picture of a step: what is drawn, where, and that its page needs nothing else."""

import re

import pytest

from memopt.errors import MissingPackageError
from memopt.ir import Phase
from memopt.report import plan_report, rendered_html, timeline_html
from memopt.report.picture import check_picture, timeline_figure
from tests.builders import QWEN, memory_of, moment_of, plan_of, qwen_layers, step_of, usual_step


def figure(memory):
    return timeline_figure(memory, title="a step")


def traces(memory):
    return {trace.name: trace for trace in figure(memory).data}


def texts(memory):
    return [annotation.text for annotation in figure(memory).layout.annotations]


def test_the_stack_adds_up_to_the_total():
    shown = traces(memory_of(usual_step()))
    stack = [trace for trace in shown.values() if trace.stackgroup]
    assert [trace.name for trace in stack] == ["parameters", "optimizer state", "gradients", "activations", "workspace"]
    assert [sum(sizes) for sizes in zip(*(trace.y for trace in stack), strict=True)] == list(shown["in all"].y)
    assert figure(memory_of(usual_step())).layout.yaxis.title.text == "GiB"


def test_a_point_says_what_runs():
    (size, told) = traces(memory_of(usual_step()))["in all"].customdata[2]
    assert size == "63.00 GiB"
    assert told.startswith("backward of the loss (LogSoftmaxBackward0)<br>workspace 8.00 GiB<br>activations 40.00 GiB")


def test_the_step_without_the_plan_is_stretched_by_phases():
    def step(end, backward):
        return step_of(
            moment_of(0, phase=Phase.FORWARD, activations=1),
            moment_of(backward, activations=3),
            moment_of(end, activations=2),
        )

    line = traces(memory_of(step(99, 50), step(399, 100)))["without the plan<br>(peak 3.00 GiB)"]
    assert list(line.x) == [0, 100, pytest.approx(100 + 300 * 49 / 50)]
    assert list(line.y) == [1, 3, 2]


def test_the_upper_end_is_drawn_and_the_peak_is_told():
    memory = memory_of(usual_step(), usual_step(activations=20), usual_step(activations=22), device_gib=48)
    assert max(traces(memory)["with the plan"].y) == 45
    assert texts(memory) == [
        "device memory, 48.00 GiB",
        "<b>forward</b>",
        "<b>backward</b>",
        "peak with the plan 43.00 .. 45.00 GiB<br>in backward of the loss (LogSoftmaxBackward0)",
    ]


def test_everything_lies_within_the_axis():
    for device_gib in (None, 48, 80, 139):
        drawn = figure(memory_of(usual_step(), device_gib=device_gib))
        peak = drawn.layout.annotations[-1]
        top = drawn.layout.yaxis.range[1]
        assert 63 < peak.ay < top
        assert not (device_gib == 80 and peak.ay < 80)


def test_a_limit_far_above_is_told_and_not_drawn():
    memory = memory_of(usual_step(), device_gib=400)
    assert texts(memory)[0] == "device memory, 400.00 GiB, lies far above"
    assert figure(memory).layout.yaxis.range[1] < 100


def test_the_page_is_one_file():
    memory = memory_of(usual_step())
    picture = timeline_html(memory, title="a step")
    page = rendered_html(plan_report(plan_of(*qwen_layers(1), build=QWEN), memory), picture=picture)
    assert page.startswith("<!DOCTYPE html>")
    assert page.index("plotly-graph-div") < page.index("model.layers.0.self_attn")
    assert not re.search(r"<script[^>]*\bsrc=|<link\b", page)


def test_without_plotly_the_error_names_the_remedy(monkeypatch):
    monkeypatch.setattr("memopt.report.picture.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install 'plotly>=6', or give --no-predict") as caught:
        check_picture()
    assert caught.value.exit_code == 2
