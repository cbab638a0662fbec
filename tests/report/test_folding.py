"""Equal layers become one name, others do not."""

import pytest

from memopt.ir import account
from memopt.report.folding import fold_chain, fold_targets, folded_name, numbers_text
from tests.builders import QWEN, mib_save, plan_of, qwen_layers


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3, 7], "3,7"),
        ([3, 4], "3-4"),
        ([0, 1, 2, 3], "0-3"),
        ([3, 7, 11], "3-11 by 4"),
        ([0, 1, 2, 5, 8, 9], "0-2,5,8-9"),
    ],
)
def test_numbers_as_text(numbers, text):
    assert numbers_text(numbers) == text


def test_one_name_stays_as_it_is():
    assert folded_name(["model.layers.3.self_attn"]) == "model.layers.3.self_attn"


def test_the_last_target_is_kept_and_so_folds_apart():
    folds = fold_targets(account(plan_of(*qwen_layers(48), build=QWEN)).targets)
    assert [fold.name for fold in folds] == ["model.layers.0-46.self_attn (x47)", "model.layers.47.self_attn"]


def test_two_towers_do_not_fold_together():
    saves = [mib_save(f"{tower}.layers.{n}.self_attn") for tower in ("vision", "text") for n in range(2)]
    folds = fold_targets(account(plan_of(*saves, passes="attention-swap")).targets)
    assert [fold.name for fold in folds] == [
        "vision.layers.0-1.self_attn (x2)",
        "text.layers.0.self_attn",
        "text.layers.1.self_attn",
    ]


def test_names_without_a_number_do_not_fold():
    assert fold_chain(["encoder.self_attn", "decoder.self_attn"]) == ("encoder.self_attn", "decoder.self_attn")


def test_a_chain_keeps_its_order():
    chain = ["a.0.self_attn", "a.1.self_attn", "b.0.self_attn", "b.1.self_attn", "a.2.self_attn"]
    assert fold_chain(chain) == ("a.0-1.self_attn (x2)", "b.0-1.self_attn (x2)", "a.2.self_attn")
