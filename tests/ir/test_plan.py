"""Plans refuse what contradicts them or their graph."""

from dataclasses import replace

import pytest

from memopt.errors import InvalidPlanError
from memopt.ir import ROUTES, Action, Decision, Plan, RegionKey
from tests.builders import Build, graph_of, mib_save, plan_of

SWAP = Decision(action=Action.SWAP, by="one", why="because", policy="attention")
RECOMPUTE = Decision(action=Action.RECOMPUTE, by="one", why="because", policy="full", route="layer")
KEEP = Decision(action=Action.KEEP, by="other", why="because", policy="attention")
ATTN = "model.layers.0.self_attn"


def plan(*saves, **build):
    return Plan(graph=graph_of(*saves or [mib_save(f"{ATTN}.q_proj")], build=Build(**build)))


def test_deciding_returns_a_new_plan():
    before = plan()
    after = before.decide({RegionKey(ATTN): SWAP})
    assert (dict(before.decisions), dict(after.decisions)) == ({}, {RegionKey(ATTN): SWAP})


def test_a_decision_is_never_overwritten():
    with pytest.raises(InvalidPlanError, match="is swap by 'one'; 'other' may not change it"):
        plan().decide({RegionKey(ATTN): SWAP}).decide({RegionKey(ATTN): KEEP})


@pytest.mark.parametrize("fqn", [ATTN, "model.layers", f"{ATTN}.q_proj"])
def test_around_and_inside_a_decision_is_decided(fqn):
    assert plan().decide({RegionKey(ATTN): SWAP}).decided(fqn)
    assert not plan().decided(fqn)


@pytest.mark.parametrize(
    ("decisions", "chain", "message"),
    [
        ({"model.nothing": SWAP}, (), "the model has no such module"),
        ({ATTN: SWAP, f"{ATTN}.q_proj": SWAP}, (), "lies inside"),
        ({ATTN: SWAP}, ("model",), "prefetch chain names 'model', on which nothing is decided"),
        (
            {ATTN: RECOMPUTE},
            (ATTN,),
            "prefetch chain names '.*self_attn', which is recomputed: nothing of it is copied",
        ),
        ({ATTN: replace(RECOMPUTE, policy="attention")}, (), "no policy is called 'attention'"),
        ({ATTN: replace(SWAP, policy="full")}, (), "no policy is called 'full'"),
        (
            {ATTN: replace(RECOMPUTE, route="scenic")},
            (),
            "no route is called 'scenic'; legal: native, submodule, layer",
        ),
        ({ATTN: replace(SWAP, route="layer")}, (), "only what is recomputed has a route"),
        ({ATTN: replace(KEEP, route="compile")}, (), "only what is recomputed has a route"),
        ({ATTN: SWAP}, (ATTN, ATTN), "prefetch chain names a module twice"),
    ],
)
def test_verify_names_the_fault(decisions, chain, message):
    wrong = Plan(
        graph=plan().graph,
        decisions={RegionKey(fqn): decision for fqn, decision in decisions.items()},
        prefetch_chain=chain,
    )
    with pytest.raises(InvalidPlanError, match=message):
        wrong.verify()


@pytest.mark.parametrize("route", ["", *ROUTES])
def test_what_is_recomputed_may_have_any_route(route):
    decision = replace(RECOMPUTE, route=route)
    plan().decide({RegionKey(ATTN): decision}).verify()
    assert decision.compiles == (route == "compile")


def test_a_module_is_decided_under_any_of_its_names():
    shared = plan(mib_save("model.a.self_attn"), aliases={"model.a.self_attn": ("model.b.self_attn",)})
    assert shared.decide({RegionKey("model.b.self_attn"): SWAP}).related("model.a.self_attn") == (SWAP,)


def test_a_note_is_taken_once():
    noted = plan().note("one").note("two").note("one")
    assert noted.notes == ("one", "two")


def test_a_region_that_nobody_knows_is_refused():
    with pytest.raises(InvalidPlanError, match="no region is called 'rope'; legal: ''"):
        plan().decide({RegionKey(ATTN, "rope"): SWAP}).verify()


def test_a_reversed_chain_is_refused():
    targets = [f"model.layers.{n}.self_attn" for n in range(3)]
    chained = replace(plan_of(*map(mib_save, targets)), prefetch_chain=tuple(targets[::2]))
    chained.verify()
    with pytest.raises(InvalidPlanError, match=r"prefetch chain has 'model\.layers\.2\.self_attn' before"):
        replace(chained, prefetch_chain=tuple(targets[::-1])).verify()


def test_two_names_of_one_module_cannot_both_be_decided():
    shared = plan(mib_save("model.a.self_attn"), aliases={"model.a.self_attn": ("model.b.self_attn",)})
    wrong = shared.decide({RegionKey("model.a.self_attn"): SWAP, RegionKey("model.b.self_attn"): SWAP})
    with pytest.raises(InvalidPlanError, match="two decisions on one module"):
        wrong.verify()
