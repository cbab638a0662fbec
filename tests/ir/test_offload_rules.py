"""Which groups stay on the device: the rules one by one, their order, and what holds of all of them."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt.ir.offload import Group, Offload
from memopt.ir.offload_rules import kept_groups, num_dropped


def layers(num_layers, *regions, num_bytes=10):
    return [Group(f"layers.{n}", region, num_bytes) for n in range(num_layers) for region in regions]


def kept(groups, **settings):
    return list(kept_groups(groups, Offload(**settings)))


@pytest.mark.parametrize(
    ("num_groups", "fraction", "dropped"),
    [
        (10, 0.9, 1), (10, 0.8, 2), (5, 0.8, 1), (10, 1.0, 0), (10, 1, 0), (10, 0.0, 10), (10, 0, 10), (3, 0.5, 1),
        (0, 0.5, 0), (1000, 0.999, 1), (10, 1e-5, 9),
    ],
)  # fmt: skip
def test_a_fraction_is_rounded_as_it_is_written(num_groups, fraction, dropped):
    assert num_dropped(num_groups, fraction) == dropped
    groups = layers(num_groups, "core_attn")
    assert kept(groups, fraction=fraction, margin=0) == list(range(num_groups - dropped, num_groups))


def test_the_margin_is_the_last_group_of_each_region():
    assert kept(layers(3, "core_attn", "mlp_fc1")) == [4, 5]
    assert kept([*layers(3, "core_attn"), Group("layers.0", "router", 5)]) == [2, 3]


def test_a_group_without_bytes_is_no_margin():
    groups = [*layers(2, "core_attn"), Group("layers.2", "core_attn", 0), Group("layers.2", "attn_proj", 0)]
    assert kept(groups) == [1]
    assert kept(groups, margin=10) == [1]


@pytest.mark.parametrize(
    ("margin", "expected"), [(0, []), (9, []), (10, [3]), (19, [3]), (20, [2, 3]), (99, [0, 1, 2, 3])]
)
def test_a_margin_in_bytes_keeps_the_last_groups_that_fit(margin, expected):
    assert kept(layers(4, "core_attn"), margin=margin) == expected


@pytest.mark.parametrize(
    ("rank", "delta", "expected"), [(0, 10, []), (1, 0, []), (1, 10, [0]), (1, 11, [0, 1]), (2, 10, [0, 1])]
)
def test_a_later_stage_keeps_the_first_groups_and_may_overshoot(rank, delta, expected):
    assert kept(layers(4, "core_attn"), pp_rank=rank, pp_rank_delta_bytes=delta, margin=0) == expected


def test_each_rule_sees_what_the_one_before_it_left():
    groups = layers(5, "core_attn", "mlp_fc1")
    reasons = kept_groups(groups, Offload(fraction=0.5, pp_rank=1, pp_rank_delta_bytes=20))
    assert [(n, why.partition(":")[0]) for n, why in reasons.items()] == [
        (0, "pipeline"), (1, "pipeline"), (5, "fraction"), (6, "fraction"), (7, "fraction"), (8, "margin"), (9, "margin"),
    ]  # fmt: skip


GROUPS = st.lists(
    st.builds(Group, st.just("layer"), st.sampled_from(["core_attn", "mlp_fc1", "router"]), st.integers(0, 100)),
    max_size=30,
)
SETTINGS = st.builds(
    Offload,
    fraction=st.one_of(st.sampled_from([0, 1, 0.1, 0.5, 0.9]), st.floats(0, 1)),
    pp_rank=st.integers(0, 3),
    pp_rank_delta_bytes=st.integers(0, 200),
    margin=st.one_of(st.just("auto"), st.integers(0, 500)),
)


@given(GROUPS, SETTINGS)
def test_what_holds_of_every_request(groups, settings):
    reasons = kept_groups(groups, settings)
    assert list(reasons) == sorted(reasons)
    assert all(groups[n].num_bytes for n in reasons)
    by_rule = {
        rule: [n for n, why in reasons.items() if why.startswith(rule)] for rule in ("margin", "pipeline", "fraction")
    }
    if settings.margin == "auto":
        assert len(by_rule["margin"]) == len({group.region for group in groups if group.num_bytes})
    else:
        assert sum(groups[n].num_bytes for n in by_rule["margin"]) <= settings.margin
    budget = settings.pp_rank * settings.pp_rank_delta_bytes
    assert sum(groups[n].num_bytes for n in by_rule["pipeline"][:-1]) < max(budget, 1)
    left = [n for n, group in enumerate(groups) if (group.num_bytes and n not in reasons) or n in by_rule["fraction"]]
    stay = len(left) * (1 - Fraction(str(settings.fraction)))
    assert stay - 1 < len(by_rule["fraction"]) <= stay
    assert by_rule["fraction"] == left[len(left) - len(by_rule["fraction"]) :]
