"""What is kept of one call of a region, and where its replay ends: by the rules that the runtime follows."""

import pytest

from memopt.ir import OP_POLICIES, Family
from memopt.ir.replay import replay_of
from tests.builders import MIB, Build, Function, graph_of, mib_save

MLP = "mlp"
LARGE, SMALL = 2, 1
MM, ATTENTION = Family.MM, Family.ATTENTION


def replayed(sizes, *functions, policy="selective", storages=()):
    """Return the replay of a region that saves tensors of those sizes (MiB), on those storages where they are named."""
    names = dict(storages)
    saves = [mib_save(MLP, size, storage=names.get(n)) for n, size in enumerate(sizes)]
    graph = graph_of(*saves, build=Build(functions=functions, flops={MLP: 10 ** len(functions)}))
    (call,) = graph.calls_of(MLP)
    return replay_of(graph, call, graph.functions, OP_POLICIES[policy])


def function(number, first, end, **options):
    """Return a function that takes a decimal digit of the operations."""
    given = {"outputs": {f"out {number}": MIB}, "family": ATTENTION, "flops": 10**number} | options
    return Function(owner=MLP, first=first, end=end, **given)


def repeated(replay, num_functions):
    """Return which functions run again: those whose digit is left, of the region's 10...0 less all that do not."""
    idle = 10**num_functions - replay.repeated_flops
    return [n for n in range(num_functions) if not idle // 10**n % 10]


def tail(replay):
    return [tensor.index for tensor in replay.tail]


def test_without_a_policy_everything_is_dropped_and_the_replay_ends_at_the_last_save():
    replay = replayed([LARGE, LARGE, SMALL], function(0, 0, 1), function(1, 2, 3), policy="full")
    assert (replay.kept, replay.tail) == ((), ())
    assert repeated(replay, 2) == [0]  # the second saves its operand, and is not run after that


def test_a_function_whose_result_is_the_last_save_is_run_for_it():
    replay = replayed([LARGE, LARGE], function(0, 0, 2), policy="full", storages={1: "out 0"})
    assert repeated(replay, 1) == [0]


def test_a_function_after_the_last_save_is_not_run():
    replay = replayed([LARGE, LARGE], function(0, 0, 1), function(1, 2, 2), policy="full")
    assert repeated(replay, 2) == [0]


def test_the_last_small_saves_are_kept():
    assert tail(replayed([LARGE, SMALL, SMALL])) == [1, 2]
    assert tail(replayed([SMALL, LARGE, SMALL])) == [2]
    assert tail(replayed([SMALL, LARGE])) == []


def test_a_small_save_before_a_kept_function_is_not_the_last():
    """The replay comes to the function anyway, for what it saves of its operands."""
    replay = replayed([SMALL, LARGE, SMALL], function(0, 1, 2))
    assert (tail(replay), replay.kept) == ([2], ())


def test_saves_on_kept_results_are_kept_whatever_their_size():
    replay = replayed([LARGE, LARGE, LARGE], function(0, 0, 1), storages={1: "out 0", 2: "out 0"})
    assert (tail(replay), len(replay.kept)) == ([1, 2], 1)


def test_a_result_that_is_read_by_nothing_is_not_kept():
    assert replayed([LARGE], function(0, 0, 1)).kept == ()
    assert len(replayed([LARGE, LARGE], function(0, 0, 1)).kept) == 1


def test_a_function_that_saves_its_own_result_is_kept_though_it_is_the_last():
    replay = replayed([LARGE, LARGE], function(0, 0, 2), storages={1: "out 0"})
    assert len(replay.kept) == 1
    assert repeated(replay, 1) == []


def test_a_function_before_the_kept_last_saves_is_not_run():
    """As the last product of an MLP, after which dropout saves a small mask."""
    replay = replayed([LARGE, LARGE, SMALL], function(0, 1, 2))
    assert (tail(replay), replay.kept, repeated(replay, 1)) == ([2], (), [])


@pytest.mark.parametrize(("result_mib", "expected"), [(2, [1]), (1, [])])
def test_a_large_last_save_stays_in_the_place_of_the_last_result(result_mib, expected):
    replay = replayed([LARGE, LARGE], function(0, 0, 1, outputs={"out": result_mib * MIB}))
    assert (tail(replay), len(replay.kept)) == (expected, not expected)


def test_what_is_kept_whole_needs_no_replay():
    replay = replayed([SMALL, SMALL], function(0, 0, 0), function(1, 1, 1, family=MM, keepable=False))
    assert tail(replay) == [0, 1]
    assert repeated(replay, 2) == []


@pytest.mark.parametrize("keepable", [True, False])
def test_alternation_counts_what_cannot_be_kept(keepable):
    functions = [function(n, n, n + 1, family=MM, keepable=keepable or n > 0) for n in range(3)]
    kept = [f.first_save for f in replayed([LARGE] * 4, *functions).kept]
    assert kept == ([0, 2] if keepable else [2])
