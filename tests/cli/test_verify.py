"""When two runs count as equal, and when counters contradict a plan."""

import math
from dataclasses import replace

import pytest
import torch

from memopt.cli.proof import Proof, input_differences, judge
from memopt.cli.training import Run
from memopt.cli.verdict import replays_table, verdict
from memopt.cli.verify import Copies, Difference, compare, copy_faults, nearest, replay_faults, training_faults
from memopt.ir import Plan, account
from memopt.passes import ActivationCheckpoint
from memopt.report import rendered
from tests.builders import MIB, Save, checkpointed_layers, graph_of, mib_save, plan_of


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


def test_nan_is_equal_to_nan_at_the_same_place():
    found = compare(run_of(math.nan, w=[1.0, math.nan]), run_of(math.nan, w=[1.0, math.nan]))
    assert found == difference()


@pytest.mark.parametrize("other", [[math.nan, 1.0], [1.0, 1.0], [math.inf, math.nan]])
def test_nan_at_another_place_is_a_difference(other):
    found = compare(run_of(w=[1.0, math.nan]), run_of(w=other))
    assert (found.gradients_equal, found.max_gradient) == (False, math.inf)


def test_beside_equal_nans_the_largest_difference_counts():
    found = compare(run_of(w=[1.0, math.nan]), run_of(w=[1.5, math.nan]))
    assert (found.gradients_equal, found.max_gradient) == (False, 0.5)


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


ONE, TWO = (plan_of(*(mib_save(f"model.layers.{n}.self_attn") for n in range(num))) for num in (2, 3))
"""Plans that swap 1 MiB of one target and of two; the last is margin."""


@pytest.mark.parametrize(
    ("plan", "out", "back", "predicted", "faults"),
    [
        (ONE, MIB, MIB, MIB, []),
        (ONE, 0, 0, MIB, ["nothing was copied out"]),
        (ONE, 0, 0, None, ["nothing was copied out"]),
        (ONE, MIB, 0, MIB, []),
        (ONE, 2 * MIB, MIB, MIB, ["the plan says 1.0 MiB"]),
        (ONE, 2 * MIB, MIB, None, []),
        (TWO, 2 * MIB, MIB, 2 * MIB, []),
        (TWO, 2 * MIB, 0, 2 * MIB, ["2.0 MiB were copied out, and nothing came back"]),
        (TWO, 0, 0, 2 * MIB, ["nothing was copied out"]),
    ],
)
def test_the_counters_must_be_those_of_the_plan(plan, out, back, predicted, faults):
    copies = Copies(copied_out_bytes=out, copied_in_bytes=back, predicted_bytes=predicted)
    found = copy_faults(account(plan), copies)
    assert len(found) == len(faults)
    assert all(part in fault for part, fault in zip(faults, found, strict=True))


def test_a_plan_that_swaps_nothing_need_not_copy():
    totals = account(plan_of(Save(owner="model.self_attn", shape=(2, 2))))
    assert copy_faults(totals, Copies(copied_out_bytes=0, copied_in_bytes=0, predicted_bytes=0)) == []


def recomputing(num_layers):
    saves, build = checkpointed_layers(num_layers)
    return account(ActivationCheckpoint(mode="selective").run(Plan(graph=graph_of(*saves, build=build))))


@pytest.mark.parametrize(("num_layers", "regions"), [(1, "1 region"), (2, "2 regions")])
def test_a_plan_that_recomputes_must_replay(num_layers, regions):
    totals = recomputing(num_layers)
    assert replay_faults(totals, 0) == [f"the plan recomputes {regions}, and nothing was replayed"]
    assert replay_faults(totals, 1) == []
    assert copy_faults(totals, Copies(copied_out_bytes=0, copied_in_bytes=0, predicted_bytes=0)) == []


def test_a_plan_that_recomputes_nothing_need_not_replay():
    assert replay_faults(account(ONE), 0) == []


def test_replays_are_shown_beside_what_the_plan_foretells():
    replays = {
        "checkpointed_calls": 6,
        "replayed_calls": 6,
        "kept_results_bytes": 48 * MIB,
        "predicted_calls": 2,
        "predicted_kept_results_bytes": 16 * MIB,
    }
    lines = [line.split() for line in rendered(replays_table(replays, 3)).splitlines()]
    assert lines[2:] == [
        ["checkpointed", "6"],
        ["replayed", "6"],
        ["kept", "results", "48.0", "MiB"],
        ["predicted", "6", "48.0", "MiB"],
    ]


def test_inputs_differ_by_name():
    planned = ONE.graph.input
    here = replace(planned, seq_length=512, target_device="cpu")
    assert input_differences(planned, here) == ["seq_length: 1024, here 512", "target_device: cuda, here cpu"]


EQUAL = {"verified": True, "losses_equal": True, "gradients_equal": True}


def headline(*, steps=3, differences=(), contradictions=(), predicted=True, **values):
    found = {**EQUAL, "verified": not (differences or contradictions), **values}
    proof = Proof(values=found, differences=differences, contradictions=contradictions, predicted=predicted)
    return verdict(proof, steps).plain


def test_the_headline_says_which_kind_of_fault_it_is():
    gives = "Verified: with the plan, 3 steps give the same losses and gradients as without it, "
    assert headline() == f"{gives}bit for bit."
    assert headline(predicted=False) == f"{gives}bit for bit (predicted bytes not compared)."
    assert headline(gradients_equal=False) == f"{gives}within what the run without it differs from itself."
    assert headline(steps=1).startswith("Verified: with the plan, 1 step gives the same")
    assert headline(verified=None).startswith("Not verified: ")
    assert headline(differences=("losses differ",), contradictions=("x",)).startswith("NOT EQUAL: ")
    assert headline(contradictions=("nothing was copied out",)) == (
        "NOT VERIFIED: nothing was copied out. Losses and gradients are the same, bit for bit."
    )
