"""When two runs count as equal, and when counters contradict a plan."""

import math

import pytest
import torch

from memopt.cli.proof import judge
from memopt.cli.training import Run
from memopt.cli.verify import Copies, Difference, compare, copy_faults, nearest, training_faults
from memopt.ir import account
from tests.builders import MIB, Save, mib_save, plan_of


def run_of(loss=1.0, **gradients):
    step = {name: torch.tensor(values) for name, values in gradients.items()}
    return Run(losses=(torch.tensor(loss),), gradients=(step,), step_seconds=0.0, peak_device_bytes=None)


def difference(loss=0.0, gradient=0.0):
    return Difference(losses_equal=not loss, gradients_equal=not gradient, max_loss=loss, max_gradient=gradient)


def test_equal_runs():
    assert compare(run_of(w=[1.0, 2.0]), run_of(w=[1.0, 2.0])) == difference()


def test_the_largest_difference_counts():
    assert compare(run_of(w=[1.0, 2.0], b=[0.0]), run_of(w=[1.5, 0.0], b=[0.0])) == difference(gradient=2.0)


def test_a_missing_gradient_is_a_difference():
    assert not compare(run_of(w=[1.0]), run_of()).gradients_equal


def test_nan_is_never_equal():
    found = compare(run_of(math.nan, w=[1.0]), run_of(math.nan, w=[1.0]))
    assert (found.losses_equal, found.max_loss) == (False, math.inf)


@pytest.mark.parametrize(
    ("planned", "noise", "num_faults"),
    [
        (difference(), None, 0),
        (difference(gradient=1e-9), None, 1),
        (difference(loss=1e-9, gradient=1e-9), None, 2),
        (difference(gradient=1e-9), difference(), 1),
        (difference(gradient=1e-3), difference(gradient=1e-3), 0),
        (difference(gradient=2e-3), difference(gradient=1e-3), 1),
        (difference(loss=1e-3), difference(gradient=1e-3), 1),
    ],
)
def test_a_plan_may_differ_no_more_than_the_baseline_does_from_itself(planned, noise, num_faults):
    assert len(training_faults(planned, noise)) == num_faults


def test_the_nearest_of_two():
    assert nearest(difference(gradient=2.0), difference(gradient=1.0)) == difference(gradient=1.0)


@pytest.mark.parametrize(
    ("planned", "num_faults"),
    [([1.0], 0), ([1.5], 0), ([1.25], 0), ([2.0], 0), ([2.25], 1)],
)
def test_two_runs_without_a_plan_set_the_tolerance(planned, num_faults):
    _, faults = judge([run_of(w=[1.0]), run_of(w=[1.5])], run_of(w=planned))
    assert len(faults) == num_faults


def test_two_equal_runs_without_a_plan_demand_equality():
    _, faults = judge([run_of(w=[1.0]), run_of(w=[1.0])], run_of(w=[1.0000001]))
    assert len(faults) == 1


def test_nothing_is_judged_without_a_run_to_compare_with():
    assert judge([], run_of(w=[1.0])) == (None, [])


@pytest.mark.parametrize(
    ("out", "back", "predicted", "num_faults"),
    [(MIB, MIB, MIB, 0), (0, 0, MIB, 1), (MIB, 0, MIB, 1), (2 * MIB, MIB, MIB, 1), (2 * MIB, MIB, None, 0)],
)
def test_the_counters_must_be_those_of_the_plan(out, back, predicted, num_faults):
    totals = account(plan_of(mib_save("model.self_attn")))
    copies = Copies(copied_out_bytes=out, copied_in_bytes=back, predicted_bytes=predicted)
    assert len(copy_faults(totals, copies)) == num_faults


def test_a_plan_that_swaps_nothing_need_not_copy():
    totals = account(plan_of(Save(owner="model.self_attn", shape=(2, 2))))
    assert copy_faults(totals, Copies(copied_out_bytes=0, copied_in_bytes=0, predicted_bytes=0)) == []
