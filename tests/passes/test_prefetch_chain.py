"""The pass prefetch-chain: the decided modules in discovery order."""

from hypothesis import given
from hypothesis import strategies as st

from memopt.ir import Action, Decision, Plan, RegionKey
from memopt.passes import Pipeline, PrefetchChain
from tests.builders import graph_of, mib_save, plan_of

ATTN = "model.layers.{}.self_attn"
SWAP = Decision(action=Action.SWAP, by="a user", why="because", policy="attention")


def test_it_chains_in_discovery_order_and_keeps_the_kept_as_links():
    plan = plan_of(*(mib_save(ATTN.format(n)) for n in range(3)))
    assert plan.prefetch_chain == tuple(ATTN.format(n) for n in range(3))


def test_it_changes_no_decision():
    before = plan_of(mib_save(ATTN.format(0)), passes="attention-swap")
    assert PrefetchChain().run(before).decisions == before.decisions


def test_nothing_decided_is_an_empty_chain():
    assert PrefetchChain().run(Plan(graph=graph_of(mib_save("model.mlp")))).prefetch_chain == ()


def test_what_is_recomputed_is_no_link():
    recompute = Decision(action=Action.RECOMPUTE, by="a user", why="because", policy="full")
    plan = plan_of(mib_save(ATTN.format(0)), mib_save("model.mlp"), passes="attention-swap")
    chained = Pipeline([PrefetchChain()]).run(plan.decide({RegionKey("model.mlp"): recompute}))
    assert chained.prefetch_chain == (ATTN.format(0),)


@given(order=st.permutations(range(4)))
def test_it_is_idempotent_verifies_and_ignores_the_order_of_decisions(order):
    graph = graph_of(*(mib_save(ATTN.format(n)) for n in range(4)))
    plan = Plan(graph=graph).decide({RegionKey(ATTN.format(n)): SWAP for n in order})
    chained = Pipeline([PrefetchChain()]).run(plan)
    assert chained.prefetch_chain == tuple(ATTN.format(n) for n in range(4))
    assert Pipeline([PrefetchChain()]).run(chained) == chained
