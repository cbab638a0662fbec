"""What recomputing drops, holds, keeps and repeats: each storage once, and the rules of the runtime."""

from dataclasses import replace

import pytest

from memopt.ir import Action, Decision, Family, KeptResults, Kind, Plan, RegionKey, account
from memopt.passes import ActivationCheckpoint
from tests.builders import MIB, Build, Function, checkpointed_layers, graph_of, mib_save

MLP, OTHER = "model.layers.0.mlp", "model.layers.1.mlp"


def recomputed(*saves, regions=(MLP,), policy="full", **build):
    """Return what a plan that recomputes some modules comes to."""
    return account(plan_by_hand(graph_of(*saves, build=Build(**build)), regions, policy))


def plan_by_hand(graph, regions, policy):
    decision = Decision(action=Action.RECOMPUTE, by="hand", why="because", policy=policy)
    plan = Plan(graph=graph).decide({RegionKey(fqn): decision for fqn in regions})
    plan.verify()
    return plan


def by_hand(mode, num_layers=2, **options):
    saves, build = checkpointed_layers(num_layers, **options)
    return account(ActivationCheckpoint(mode=mode).run(Plan(graph=graph_of(*saves, build=build))))


def freed(totals):
    return totals.dropped_bytes // MIB, totals.freed_bytes // MIB


def test_a_storage_that_a_region_saves_twice_counts_once():
    totals = recomputed(mib_save(MLP, 2, storage="x"), mib_save(MLP, 2, storage="x"), mib_save(MLP))
    assert freed(totals) == (3, 3)
    assert (totals.covered_bytes, totals.swap_bytes, totals.num_tensors) == (0, 0, 0)


def test_a_storage_of_two_regions_is_dropped_and_freed_once():
    totals = recomputed(mib_save(MLP, storage="x"), mib_save(OTHER, storage="x"), regions=(MLP, OTHER))
    assert freed(totals) == (1, 1)
    assert [target.freed_bytes for target in totals.targets] == [MIB, 0]


def test_parameters_and_buffers_are_never_freed():
    saves = [mib_save(MLP, 2, kind=kind) for kind in Kind]
    totals = recomputed(*saves)
    assert totals.targets[0].kept == (("buffer", 2 * MIB), ("parameter", 2 * MIB))
    assert freed(totals) == (4, 4)  # an activation, and the copy that autocast makes of a parameter


@pytest.mark.parametrize(
    ("others", "build"),
    [
        ([], {"held": ("x",)}),
        ([mib_save("model.norm", storage="x")], {}),
        ([mib_save(OTHER, storage="x")], {}),
    ],
)
def test_what_someone_else_holds_is_dropped_and_not_freed(others, build):
    assert freed(recomputed(mib_save(MLP, storage="x"), *others, **build)) == (1, 0)


def test_inputs_are_held():
    inputs = {MLP: {"x": MIB, "new": 3 * MIB}}
    totals = recomputed(mib_save(MLP, storage="x"), mib_save(MLP, 2), inputs=inputs)
    assert freed(totals) == (2, 2)
    assert (totals.input_bytes, totals.added_bytes, totals.net_freed_bytes) == (4 * MIB, 3 * MIB, -MIB)
    assert totals.targets[0].kept == (("input of a region", MIB),)
    assert totals.targets[0].recompute.input_bytes == 4 * MIB


def test_an_input_of_another_region_is_held_too_and_counts_once():
    """What one layer returns is what the next one is given."""
    inputs = {MLP: {"in": MIB}, OTHER: {"between": MIB, "in": MIB}}
    saves = [mib_save(MLP, storage="between"), mib_save(OTHER, storage="in"), mib_save(OTHER, 2)]
    totals = recomputed(*saves, regions=(MLP, OTHER), inputs=inputs)
    assert freed(totals) == (2, 2)
    assert (totals.input_bytes, totals.added_bytes) == (2 * MIB, 0)
    assert [target.recompute.input_bytes for target in totals.targets] == [MIB, 2 * MIB]


def test_a_region_that_saves_nothing_holds_nothing():
    totals = recomputed(
        mib_save(OTHER), mib_save(MLP), regions=(MLP,), inputs={MLP: {"x": MIB}, OTHER: {"y": MIB}}, flops={MLP: 7}
    )
    graph = graph_of(mib_save(MLP), build=Build(inputs={MLP: {"x": MIB}}, flops={MLP: 7}))
    calls = tuple(replace(call, end_save=call.first_save) for call in graph.calls)
    silent = account(plan_by_hand(replace(graph, calls=calls), (MLP,), "full"))
    assert (totals.input_bytes, totals.repeated_flops) == (MIB, 7)
    assert (silent.input_bytes, silent.repeated_flops, silent.targets[0].recompute.num_calls) == (0, 0, 0)


def test_a_call_within_a_call_of_itself_is_replayed_with_it():
    graph = graph_of(mib_save(MLP), mib_save(MLP), build=Build(flops={MLP: 10}))
    (call,) = graph.calls_of(MLP)
    inner = replace(call, index=len(graph.calls), parent=call.index, first_save=1, flops=4)
    again = replace(inner, index=inner.index + 1, parent=0, first_save=2, end_save=3)
    saved = (*graph.saved, replace(graph.saved[0], index=2, call=again.index, storage=7))
    graph = replace(graph, calls=(*graph.calls, inner, again), saved=saved)
    totals = account(plan_by_hand(graph, (MLP,), "full"))
    assert freed(totals) == (3, 3)
    assert (totals.targets[0].recompute.num_calls, totals.repeated_flops) == (2, 14)
    assert totals.replay_bytes == 2 * MIB


def kept(policy, *families, last=True, **options):
    """Return which of the functions of one region are kept; each saves 2 MiB, then something large is saved."""
    saves = [mib_save(MLP, 2) for _ in families] + [mib_save(MLP, 128)] * last
    functions = tuple(
        Function(owner=MLP, first=n, end=n + 1, outputs={f"out {n}": MIB << n}, family=family, flops=10**n, **options)
        for n, family in enumerate(families)
    )
    build = {"functions": functions, "flops": {MLP: 10 ** len(families)}}
    target = recomputed(*saves, policy=policy, **build).targets[0].recompute
    numbers = [n for n in range(len(families)) if target.result_bytes >> 20 & 1 << n]
    assert sum(MIB << n for n in numbers) == target.result_bytes
    assert sum(results.num_calls for results in target.results) == len(numbers)
    return numbers


MM, GROUPED, ATTENTION, ADDMM = Family.MM, Family.GROUPED_MM, Family.ATTENTION, Family.ADDMM


@pytest.mark.parametrize(
    ("policy", "families", "expected"),
    [
        ("full", [MM, ATTENTION], []),
        ("selective", [MM, MM, MM, MM, MM], [0, 2, 4]),
        ("selective", [MM, GROUPED, ATTENTION, MM, ADDMM, ADDMM], [0, 2, 3, 4, 5]),
        ("attention-only", [MM, ATTENTION, ADDMM, ATTENTION], [1, 3]),
    ],
)
def test_which_results_are_kept(policy, families, expected):
    assert kept(policy, *families) == expected


def test_the_last_function_is_not_kept_where_nothing_is_saved_after_it():
    assert kept("selective", ATTENTION, ATTENTION, last=False) == [0]
    assert kept("selective", MM, MM, MM, last=False) == [0]


def test_results_that_cannot_stand_for_their_function_are_not_kept():
    assert kept("selective", ATTENTION, MM, MM, MM, keepable=False) == []


def test_a_function_that_is_not_kept_counts_in_the_alternation():
    functions = tuple(
        Function(owner=MLP, first=n, end=n + 1, outputs={f"out {n}": MIB}, keepable=bool(n)) for n in range(3)
    )
    totals = recomputed(*[mib_save(MLP, 2)] * 4, policy="selective", functions=functions)
    assert totals.targets[0].recompute.results == (KeptResults(family=MM, num_calls=1, num_bytes=MIB),)


def test_each_call_of_a_region_begins_the_alternation_anew():
    graph = graph_of(
        *[mib_save(MLP, 2) for _ in range(4)],
        build=Build(functions=(Function(owner=MLP, first=0, end=1, outputs={"one": MIB}, flops=3),), flops={MLP: 10}),
    )
    (call,) = graph.calls_of(MLP)
    first, second = replace(call, end_save=2), replace(call, index=len(graph.calls), first_save=2)
    functions = (*graph.functions, replace(graph.functions[0], call=second.index, first_save=2, end_save=3))
    calls = (*(first if one is call else one for one in graph.calls), second)
    totals = account(plan_by_hand(replace(graph, calls=calls, functions=functions), (MLP,), "selective"))
    assert totals.targets[0].recompute.results[0].num_calls == 2
    assert totals.repeated_flops == 2 * 10 - 2 * 3


def test_functions_of_other_modules_are_not_kept():
    other = Function(owner=OTHER, first=2, end=3, outputs={"y": MIB}, family=ATTENTION)
    saves = [mib_save(MLP, 2), mib_save(MLP, 2), mib_save(OTHER, 2), mib_save(OTHER, 2)]
    assert recomputed(*saves, policy="selective", functions=(other,)).result_bytes == 0


def test_statistics_are_kept_with_the_results():
    function = Function(
        owner=MLP, first=0, end=2, outputs={"out": 2 * MIB}, family=ATTENTION, statistics={"logsumexp": MIB}
    )
    saves = [mib_save(MLP, 2, storage="out"), mib_save(MLP, storage="logsumexp"), mib_save(MLP, 4)]
    totals = recomputed(*saves, policy="selective", functions=(function,))
    assert freed(totals) == (4, 4)
    assert (totals.result_bytes, totals.added_bytes) == (3 * MIB, 0)
    assert totals.targets[0].kept == (("kept result", 3 * MIB),)


def test_two_layers_in_full():
    totals = by_hand("full")
    # a layer drops 8 + 4 + 4 + 4 + 4 + 12 + 12; the rotary embedding is an input, and its own input is new;
    # the replay ends where the last product saves its operand
    assert freed(totals) == (96, 96)
    assert (totals.input_bytes, totals.added_bytes) == (9 * MIB, 8 * MIB)
    assert totals.net_freed_bytes == 88 * MIB
    assert totals.replay_bytes == 48 * MIB
    assert (totals.flops, totals.repeated_flops) == (9_000_000_000, 2 * (4_000_000_000 - 750_000_000))


def test_two_layers_selectively():
    totals = by_hand("selective")
    (one, _) = totals.targets
    assert one.recompute.results == (
        KeptResults(family=MM, num_calls=1, num_bytes=4 * MIB),  # the second is not kept, the third is the last
        KeptResults(family=ATTENTION, num_calls=1, num_bytes=4 * MIB + 1024),
    )
    assert freed(totals) == (88, 88)
    assert totals.added_bytes == 2 * (4 * MIB + 4 * MIB + 1024)  # entry, projected, logsumexp
    assert totals.repeated_flops == 2 * (4_000_000_000 - 2_500_000_000 - 750_000_000)
