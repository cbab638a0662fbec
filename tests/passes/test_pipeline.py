"""The pipeline verifies around every pass and tells its observers; passes are found by name."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from memopt.errors import IllegalValueError, InvalidPlanError, UnknownNameError
from memopt.ir import Action, Decision, Plan, RegionKey
from memopt.passes import (
    PASSES,
    ActivationCheckpoint,
    AttentionSwap,
    Pass,
    Pipeline,
    PrefetchChain,
    make_pass,
    parse_passes,
)
from tests.builders import graph_of, mib_save


@dataclass(frozen=True, kw_only=True)
class Stray(Pass):
    name: ClassVar[str] = "stray"

    def run(self, plan):
        decision = Decision(action=Action.SWAP, by=self.name, why="wrong", policy="attention")
        return plan.decide({RegionKey("no.such.module"): decision})


def fresh():
    return Plan(graph=graph_of(mib_save("model.self_attn")))


def test_a_pass_that_breaks_the_plan_is_found_out():
    with pytest.raises(InvalidPlanError, match=r"'no\.such\.module': the model has no such module"):
        Pipeline([Stray()]).run(fresh())


def test_observers_see_before_and_after():
    seen = []
    observer = lambda pass_, before, after: seen.append((pass_.name, len(before.decisions), len(after.decisions)))  # noqa: E731
    Pipeline([AttentionSwap(), PrefetchChain()], [observer]).run(fresh())
    assert seen == [("attention-swap", 0, 1), ("prefetch-chain", 1, 1)]


def test_an_empty_pipeline_returns_the_plan():
    assert Pipeline([]).run(fresh()) == fresh()


def test_every_registered_name_is_the_name_of_its_pass():
    assert [make_pass(name).name for name in PASSES] == list(PASSES)


def test_names_are_parsed_in_order():
    assert parse_passes(" prefetch-chain , attention-swap,") == (PrefetchChain(), AttentionSwap())


def test_an_unknown_pass_names_the_nearest():
    with pytest.raises(UnknownNameError, match="no pass is called 'attention-swp'; did you mean 'attention-swap'"):
        parse_passes("attention-swp")


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("attention-swap:margin_bytes=0", AttentionSwap(margin_bytes=0)),
        ("attention-swap:margin_bytes=none", AttentionSwap()),
        ("activation-checkpoint", ActivationCheckpoint(mode="full")),
        ("activation-checkpoint:mode=selective", ActivationCheckpoint(mode="selective")),
        ("activation-checkpoint:compiles=true:mode=full", ActivationCheckpoint(compiles=True)),
    ],
)
def test_options_follow_the_name(text, made):
    assert make_pass(text) == made


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "activation-checkpoint:mod=full",
            UnknownNameError,
            "no option of activation-checkpoint is called 'mod'; did you mean 'mode'",
        ),
        ("prefetch-chain:mode=full", UnknownNameError, "no option of prefetch-chain is called 'mode'"),
        ("activation-checkpoint:mode=off", IllegalValueError, "mode='off' is not legal; legal: full, selective"),
        ("activation-checkpoint:compiles=1", IllegalValueError, "compiles=1 is not legal; legal: true, false"),
        ("attention-swap:margin_bytes=true", IllegalValueError, "margin_bytes=True is not legal"),
    ],
)
def test_a_wrong_option_is_named(text, error, message):
    with pytest.raises(error, match=message):
        parse_passes(text)
