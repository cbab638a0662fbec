"""The report as it is read, and that its printed numbers add up."""

import json
import re
from collections import Counter

import pytest

from memopt.ir import Action, Decision, KvSharing, RegionKey, account
from memopt.passes import ActivationCheckpoint, AttentionSwap, Pipeline, PrefetchChain
from memopt.report import plan_report, plan_summary, rendered, rendered_html, rendered_svg
from tests.builders import (
    MIB,
    QWEN,
    Build,
    Plan,
    Save,
    checkpointed_layers,
    graph_of,
    mib_save,
    plan_of,
    qwen_layers,
)


def test_qwen3_30b_a3b(golden):
    assert rendered(plan_report(plan_of(*qwen_layers(48), build=QWEN))) == golden


def test_qwen3_30b_a3b_as_svg(golden_svg):
    plan = plan_of(*qwen_layers(48), build=QWEN)
    assert rendered_svg(plan_report(plan), title="memopt qwen3-30b-a3b") == golden_svg


def test_two_layers_as_json(golden_json):
    summary = plan_summary(plan_of(*qwen_layers(2), build=QWEN))
    assert json.dumps(summary, indent=2) + "\n" == golden_json


def test_nothing_decided(golden):
    assert rendered(plan_report(Plan(graph=graph_of(*qwen_layers(4), build=QWEN)))) == golden


def test_one_target_that_is_not_an_accepted_model(golden):
    build = Build(class_name="LlamaForCausalLM", notes=("experts were traced with balanced routing",))
    assert rendered(plan_report(plan_of(mib_save("model.layers.0.self_attn", 3), build=build))) == golden


def test_nothing_passes_the_policy(golden):
    assert rendered(plan_report(plan_of(Save(owner="model.layers.0.self_attn", shape=(16, 16))))) == golden


def test_alternating_layers_fold_apart(golden):
    saves = [mib_save(f"model.layers.{layer}.self_attn", 1 + layer % 2) for layer in range(9)]
    assert rendered(plan_report(plan_of(*saves))) == golden


def test_copied_but_held_elsewhere(golden):
    saves = [
        mib_save("model.layers.0.self_attn", 4, storage="shared"),
        mib_save("model.layers.0.mlp", 4, storage="shared"),
        mib_save("model.layers.1.self_attn", 4),
        mib_save("model.layers.2.self_attn", 4, storage="logits"),
    ]
    plan = Pipeline([AttentionSwap(margin_bytes=0), PrefetchChain()]).run(
        Plan(graph=graph_of(*saves, build=Build(held=("logits",))))
    )
    assert rendered(plan_report(plan)) == golden


def checkpointed(num_layers=4, *, mode="full", compiles=False, **options):
    saves, build = checkpointed_layers(num_layers, **options)
    pass_ = ActivationCheckpoint(mode=mode, compiles=compiles)
    return Pipeline([pass_]).run(Plan(graph=graph_of(*saves, build=build)))


def test_full_checkpointing_of_whole_layers(golden):
    assert rendered(plan_report(checkpointed())) == golden


def test_full_checkpointing_of_parts_because_a_layer_is_frozen(golden):
    assert rendered(plan_report(checkpointed(frozen=("model.layers.2.mlp",)))) == golden


def test_full_checkpointing_of_what_is_compiled(golden):
    assert rendered(plan_report(checkpointed(compiles=True))) == golden


def test_selective_checkpointing(golden):
    assert rendered(plan_report(checkpointed(mode="selective"))) == golden


def test_selective_checkpointing_that_is_downgraded(golden):
    assert rendered(plan_report(checkpointed(mode="selective", kv_sharing=KvSharing.CACHE))) == golden


def test_checkpointing_that_costs_memory(golden):
    saves = [mib_save("model.layers.0.mlp", 2)]
    build = Build(classes={"layers": "ModuleList"}, inputs={"model.layers.0.mlp": {"x": 3 << 20}})
    plan = Pipeline([ActivationCheckpoint()]).run(Plan(graph=graph_of(*saves, build=build)))
    assert rendered(plan_report(plan)) == golden


def test_two_checkpointed_layers_as_json(golden_json):
    summary = plan_summary(checkpointed(2, mode="selective"))
    assert json.dumps(summary, indent=2) + "\n" == golden_json


def test_recomputing_beside_a_swap_that_was_decided_by_hand(golden):
    saves = [mib_save("model.self_attn", 4), mib_save("model.mlp", 2)]
    decisions = {
        RegionKey("model.self_attn"): Decision(action=Action.SWAP, by="hand", why="it is large", policy="attention"),
        RegionKey("model.mlp"): Decision(action=Action.RECOMPUTE, by="hand", why="it is cheap", policy="full"),
    }
    plan = Plan(graph=graph_of(*saves, build=QWEN)).decide(decisions)
    assert rendered(plan_report(Pipeline([PrefetchChain()]).run(plan))) == golden


def test_html_is_one_page():
    html = rendered_html(plan_report(plan_of(*qwen_layers(2), build=QWEN)))
    assert html.startswith("<!DOCTYPE html>")
    assert "model.layers.0.self_attn" in html
    assert "http" not in html.replace("http-equiv", "")


def test_svg_needs_nothing_from_the_net():
    svg = rendered_svg(plan_report(plan_of(mib_save("model.self_attn"))), title="memopt")
    assert "url(http" not in svg.replace('"', "")


def column(lines):
    """Return the sizes that table lines print before their action."""
    return [float(m[1].replace(",", "")) for line in lines if (m := re.search(r"([\d,]+\.\d\d)  (?:swap|keep) ", line))]


@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_the_printed_columns_add_up(num_layers):
    plan = plan_of(*qwen_layers(num_layers), build=QWEN)
    text = rendered(plan_report(plan))
    table = text[text.index("tensor ") :].splitlines()
    subtotal = next(n for n, line in enumerate(table) if line.strip().startswith("covered"))
    covered = float(table[subtotal].split()[-1])
    assert sum(column(table[:subtotal])) == pytest.approx(covered, abs=0.05)

    totals = account(plan)
    assert covered * num_layers == pytest.approx(totals.covered_bytes / 2**20)
    kept = sum(size for _, size in totals.targets[0].kept) / 2**20
    end = next(n for n, line in enumerate(table) if n > subtotal + 1 and not line.strip())
    assert sum(column(table[subtotal:end])) == pytest.approx(kept, abs=0.05)

    savers = text[text.index("saved by") :].splitlines()
    total = next(n for n, line in enumerate(savers) if line.strip().startswith("all"))
    rows = [line.split() for line in savers[2:total] if line.strip()]
    assert sum(float(row[-1].replace(",", "")) for row in rows) == pytest.approx(
        float(savers[total].split()[-1].replace(",", "")), abs=0.05
    )


CHECKPOINTED = [
    {},
    {"mode": "selective"},
    {"compiles": True},
    {"frozen": ("model.layers.2.mlp",)},
    {"held": ("model.layers.1 activated",)},
]
SIZES = {"B": 2**-20, "KiB": 2**-10, "MiB": 1, "GiB": 2**10}


def total(text, what):
    """Return a size of the printed totals in MiB, 0 where it is left out."""
    match = re.search(rf"^  {what} +([-+]?[\d,.]+) (\w+)", text, re.MULTILINE)
    return float(match[1].replace(",", "")) * SIZES[match[2]] if match else 0


def printed_tables(text):
    """Return (number of modules, rows) of each table of a recomputed module; a row is (what, MiB)."""
    titles = re.split(r"^  (?=model\S* .*\n  recompute)", text.partition("All activations")[0], flags=re.MULTILINE)[1:]
    for part in titles:
        rows = re.findall(r"^  (saved \w+ \w+|held for the replay|results kept|freed) +([\d,.]+)", part, re.MULTILINE)
        count = re.match(r".*\(x(\d+)\)", part)
        yield int(count[1]) if count else 1, [(what, float(size.replace(",", ""))) for what, size in rows]


@pytest.mark.parametrize("options", CHECKPOINTED)
def test_the_printed_rows_of_a_checkpoint_add_up(options):
    plan = checkpointed(4, **options)
    text, totals = rendered(plan_report(plan)), account(plan)
    sums = Counter()
    for count, rows in printed_tables(text):
        for what, size in rows:
            sums[what] += count * size
    assert sums["saved and dropped"] == pytest.approx(-total(text, "dropped after forward"), abs=0.2)
    assert sums["saved and dropped"] == pytest.approx(totals.dropped_bytes / 2**20, abs=0.2)
    assert sums["freed"] == pytest.approx(sums["saved and dropped"] - total(text, "dropped, but not freed"), abs=0.2)
    assert total(text, "really freed") == pytest.approx(sums["freed"] - total(text, "newly held"), abs=0.2)
    signed = ("dropped after forward", "dropped, but not freed", "newly held")
    left = total(text, "saved without the plan") + sum(total(text, what) for what in signed)
    assert total(text, "left with the plan") == pytest.approx(left, abs=0.2)
    assert total(text, "really freed") == pytest.approx(total(text, "saved without the plan") - left, abs=0.2)
    assert sums["results kept"] == pytest.approx(total(text, "kept results"), abs=0.2)
    saved = sums["saved and dropped"] + sums["saved and kept"]
    assert sums["saved in all"] == pytest.approx(saved, abs=0.2)
    in_layers = [t for t in plan.graph.saved if any(t.owner.startswith(key.fqn) for key in plan.decisions)]
    shared = 3 * MIB  # the rotary embedding, which each of four layers saves
    assert saved == pytest.approx(
        (sum({t.storage: t.storage_bytes for t in in_layers}.values()) + shared) / MIB, abs=0.2
    )


@pytest.mark.parametrize("options", CHECKPOINTED)
def test_the_json_of_a_checkpoint_adds_up(options):
    summary = plan_summary(checkpointed(4, **options))
    sums, targets = summary["recompute"], summary["targets"]
    assert sum(target["freed_bytes"] for target in targets) == sums["freed_bytes"]
    assert sum(target["covered_bytes"] for target in targets) == sums["dropped_bytes"]
    assert sum(target["recompute"]["repeated_flops"] for target in targets) == sums["repeated_flops"] < sums["flops"]
    kept = [one["bytes"] for target in targets for one in target["recompute"]["results"]]
    assert sum(kept) + sum(target["recompute"]["last_bytes"] for target in targets) == sums["result_bytes"]
    assert sums["net_freed_bytes"] == sums["freed_bytes"] - sums["added_bytes"]
    assert (summary["swap"], summary["prefetch_chain"]) == (dict.fromkeys(summary["swap"], 0), [])
    for target in targets:
        rows = [row for row in target["tensors"] if row["reason"] != "same storage"]
        dropped = sum(row["storage_bytes"] for row in rows if row["action"] == "recompute")
        assert dropped == target["covered_bytes"]
        assert sum(row["storage_bytes"] for row in rows) == dropped + sum(target["kept"].values())


def test_rows_of_the_json_that_are_not_the_same_storage_add_up():
    shared = "model.layers.0.self_attn"
    early = [
        mib_save(shared, 2, storage="one", requires_grad=False),  # decided by the next save of its storage
        mib_save(shared, 2, storage="one"),
        mib_save(shared, 3, storage="two", requires_grad=False),
        mib_save(shared, 3, storage="two", requires_grad=False),
    ]
    for saves in (qwen_layers(3), early):
        for target in plan_summary(plan_of(*saves, build=QWEN))["targets"]:
            rows = [row for row in target["tensors"] if row["reason"] != "same storage"]
            sums = Counter()
            for row in rows:
                sums[row["reason"]] += row["storage_bytes"]
            covered = sums.pop("passes the policy", 0) + sums.pop("margin", 0)
            assert (covered, sums) == (target["covered_bytes"], target["kept"])
            assert len(rows) < len(target["tensors"])


def test_the_json_adds_up():
    summary = plan_summary(plan_of(*qwen_layers(6), build=QWEN))
    targets = summary["targets"]
    assert sum(target["covered_bytes"] for target in targets) == summary["swap"]["covered_bytes"]
    assert sum(target["swap_bytes"] for target in targets) == summary["swap"]["bytes_per_step"]
    assert sum(target["freed_bytes"] for target in targets) == summary["swap"]["freed_bytes"]
    assert summary["saved"]["total_bytes"] == (
        summary["saved"]["parameter_bytes"] + summary["saved"]["activation_bytes"]
    )
    assert summary["prefetch_chain"] == [target["fqn"] for target in targets]
    assert json.loads(json.dumps(summary)) == summary
