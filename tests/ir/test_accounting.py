"""Bytes: each storage once, wherever it is saved."""

from memopt.ir import Kind, Plan, account, saved_bytes
from memopt.passes import AttentionSwap
from tests.builders import MIB, Build, Save, graph_of, mib_save

FIRST, SECOND, LAST = (f"model.layers.{n}.self_attn" for n in range(3))


def accounted(*saves, margin_bytes=0, **build):
    graph = graph_of(*saves, build=Build(**build))
    return account(AttentionSwap(margin_bytes=margin_bytes).run(Plan(graph=graph)))


def test_a_storage_that_one_target_saves_twice_counts_once():
    totals = accounted(mib_save(f"{FIRST}.q_proj", 2, storage="x"), mib_save(f"{FIRST}.k_proj", 2, storage="x"))
    assert (totals.covered_bytes, totals.swap_bytes, totals.num_tensors) == (2 * MIB, 2 * MIB, 1)


def test_a_storage_of_two_targets_is_copied_by_both_and_freed_once():
    totals = accounted(mib_save(FIRST, 2, storage="x"), mib_save(SECOND, 2, storage="x"), mib_save(LAST))
    assert [target.covered_bytes for target in totals.targets] == [2 * MIB, 2 * MIB, MIB]
    assert [target.swap_bytes for target in totals.targets] == [2 * MIB, 2 * MIB, MIB]
    assert (totals.covered_bytes, totals.swap_bytes, totals.freed_bytes) == (3 * MIB, 5 * MIB, 3 * MIB)


def test_a_target_that_the_margin_keeps_is_covered_and_not_copied():
    last = accounted(mib_save(FIRST), mib_save(LAST), margin_bytes=None).targets[-1]
    assert (last.covered_bytes, last.num_covered, last.swap_bytes, last.freed_bytes) == (MIB, 1, 0, 0)
    assert last.lines[0].reason == "margin"
    assert last.lines[0].covered


def test_what_a_module_outside_saves_too_is_copied_and_not_freed():
    totals = accounted(mib_save(FIRST, storage="x"), mib_save("model.layers.0.mlp", storage="x"))
    assert (totals.swap_bytes, totals.freed_bytes) == (MIB, 0)


def test_what_the_caller_holds_is_copied_and_not_freed():
    totals = accounted(mib_save(FIRST, storage="out"), held=("out",))
    assert (totals.swap_bytes, totals.freed_bytes) == (MIB, 0)


def test_kept_bytes_have_the_reason_of_the_first_save():
    small, weight = Save(owner=FIRST, shape=(4, 4)), mib_save(FIRST, kind=Kind.PARAMETER)
    (target,) = accounted(mib_save(FIRST), small, weight).targets
    assert target.kept == (("parameter", MIB), ("under 1 MiB", 64))


def test_everything_saved_splits_into_parameters_and_activations():
    graph = graph_of(mib_save("a", storage="x"), mib_save("b", storage="x"), mib_save("b", 3, kind=Kind.PARAMETER))
    sums = saved_bytes(graph.saved)
    assert (sums.total_bytes, sums.parameter_bytes, sums.activation_bytes) == (4 * MIB, 3 * MIB, MIB)
