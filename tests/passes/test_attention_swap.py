"""The pass attention-swap: what it decides, what it leaves alone, and the edge of the policy."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.errors import IllegalValueError, NoSelfAttentionError
from memopt.ir import Action, Decision, Kind, Plan, RegionKey, account
from memopt.passes import AttentionSwap, Pipeline
from tests.builders import MIB, Build, Save, graph_of, mib_save, plan_of

ATTN = "model.layers.{}.self_attn"


def swapped(*saves, build=None, **options):
    return AttentionSwap(**options).run(Plan(graph=graph_of(*saves, build=build)))


def actions(plan):
    return {str(key): decision.action.value for key, decision in plan.decisions.items()}


def test_it_swaps_every_target_but_the_last():
    plan = swapped(*(mib_save(ATTN.format(n)) for n in range(3)))
    assert actions(plan) == {ATTN.format(0): "swap", ATTN.format(1): "swap", ATTN.format(2): "keep"}


def test_a_single_target_is_the_last_one():
    """Nothing comes after it that could give its memory back before backward wants it."""
    assert actions(swapped(mib_save(ATTN.format(0)))) == {ATTN.format(0): "keep"}
    assert actions(swapped(mib_save(ATTN.format(0)), margin_bytes=0)) == {ATTN.format(0): "swap"}


@pytest.mark.parametrize("margin_bytes", [-1, 3.5, "1 GiB"])
def test_a_margin_that_is_no_number_of_bytes(margin_bytes):
    with pytest.raises(IllegalValueError, match="margin_bytes"):
        AttentionSwap(margin_bytes=margin_bytes)


@pytest.mark.parametrize(("margin_mib", "num_kept"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (100, 3)])
def test_the_margin_keeps_whole_targets_from_the_end(margin_mib, num_kept):
    plan = swapped(*(mib_save(ATTN.format(n), 2) for n in range(3)), margin_bytes=margin_mib * MIB)
    assert list(actions(plan).values()) == ["swap"] * (3 - num_kept) + ["keep"] * num_kept


def test_a_target_that_covers_nothing_is_no_margin():
    plan = swapped(Save(owner=ATTN.format(0), shape=(4, 4)), margin_bytes=MIB)
    assert actions(plan) == {ATTN.format(0): "swap"}


def test_it_leaves_earlier_decisions_alone():
    earlier = Decision(action=Action.KEEP, by="a user", why="because", policy="attention")
    key = RegionKey(ATTN.format(0))
    graph = graph_of(*(mib_save(ATTN.format(n)) for n in range(3)))
    plan = AttentionSwap().run(Plan(graph=graph).decide({key: earlier}))
    assert plan.decisions[key] == earlier
    assert actions(plan)[ATTN.format(1)] == "swap"


def test_a_decision_inside_a_target_leaves_the_target_alone():
    earlier = Decision(action=Action.KEEP, by="a user", why="because", policy="attention")
    graph = graph_of(mib_save(ATTN.format(0) + ".q_proj"), mib_save(ATTN.format(1)))
    plan = AttentionSwap().run(Plan(graph=graph).decide({RegionKey(ATTN.format(0) + ".q_proj"): earlier}))
    plan.verify()
    assert RegionKey(ATTN.format(0)) not in plan.decisions


def test_the_inside_of_a_target_is_not_searched():
    plan = swapped(mib_save("model.self_attn.inner.self_attn"))
    assert actions(plan).keys() == {"model.self_attn"}


def test_only_the_registered_name_counts():
    with pytest.raises(NoSelfAttentionError) as error:
        swapped(mib_save("transformer.h.0.attn"), build=Build(class_name="GPT2LMHeadModel"))
    assert str(error.value) == (
        "activation_swap='attention' found no self_attn modules in GPT2LMHeadModel; "
        "expected attention modules registered as self_attn"
    )
    assert error.value.exit_code == 1


def edge(**options):
    save = {"owner": ATTN.format(0), "shape": (512, 512), **options}
    (target,) = account(swapped(Save(**save))).targets
    return target.covered_bytes, dict(target.kept)


def test_exactly_one_mib_is_swapped():
    assert edge() == (MIB, {})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"shape": (511, 512)}, "under 1 MiB"),
        ({"shape": (MIB // 4,)}, "under 2 dims"),
        ({"requires_grad": False}, "needs no grad"),
        ({"storage_bytes": 2 * MIB}, "view of part of a storage"),
        ({"kind": Kind.PARAMETER}, "parameter"),
        ({"kind": Kind.BUFFER}, "buffer"),
        ({"kind": Kind.PARAMETER_CAST}, "parameter cast"),
    ],
)
def test_what_the_policy_keeps_and_why(options, reason):
    covered, kept = edge(**options)
    assert (covered, list(kept)) == (0, [reason])


saves = st.lists(
    st.builds(
        Save,
        owner=st.sampled_from(
            [ATTN.format(n) for n in range(4)] + ["model.layers.0.mlp", "model.self_attn.q.self_attn"]
        ),
        shape=st.lists(st.sampled_from([1, 64, 512, 1024]), max_size=3).map(tuple),
        storage=st.sampled_from([None, None, "one", "two"]),
        requires_grad=st.booleans(),
        kind=st.sampled_from(Kind),
    ).map(lambda save: replace(save, storage=save.storage and f"{save.storage} {save.shape}")),  # all of it is saved
    min_size=1,
    max_size=12,
).filter(lambda saves: any("self_attn" in save.owner for save in saves))


@settings(deadline=None, max_examples=60)
@given(saves=saves, margin=st.sampled_from([None, 0, MIB, 5 * MIB]))
def test_it_is_idempotent_and_verifies(saves, margin):
    saves = sorted(saves, key=lambda save: save.owner)
    swap = AttentionSwap(margin_bytes=margin)
    once = Pipeline([swap]).run(Plan(graph=graph_of(*saves)))
    assert Pipeline([swap]).run(once) == once
    totals = account(once)
    assert totals.freed_bytes <= totals.swap_bytes <= totals.covered_bytes


def test_the_same_by_name():
    assert plan_of(mib_save(ATTN.format(0)), passes="attention-swap") == swapped(mib_save(ATTN.format(0)))
