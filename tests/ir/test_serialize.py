"""Plans survive a file, and a file that is no plan is named."""

import json

import pytest

from memopt.errors import InvalidPlanError, UnreadableFileError
from memopt.ir import load_plan, plan_from_json, plan_to_json, save_plan
from tests.builders import QWEN, mib_save, plan_of, qwen_layers


def test_a_plan_survives_a_file(tmp_path):
    plan = plan_of(*qwen_layers(3), build=QWEN)
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UnreadableFileError, match=r"plan '.*plan\.json' cannot be read: No such file"):
        load_plan(tmp_path / "plan.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema_version": 1}'])
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(UnreadableFileError, match="plan 'text' cannot be read: ") as error:
        plan_from_json(text)
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("key", "value"), [("schema_version", 2), ("extra", 1), ("decisions", [["a", "", {}]])])
def test_a_wrong_key_is_named(key, value):
    document = json.loads(plan_to_json(plan_of(mib_save("model.self_attn"))))
    with pytest.raises(UnreadableFileError, match=key):
        plan_from_json(json.dumps({**document, key: value}))


def test_a_plan_that_contradicts_its_graph_is_refused():
    document = json.loads(plan_to_json(plan_of(mib_save("model.self_attn"))))
    document["prefetch_chain"] = ["model.elsewhere"]
    with pytest.raises(InvalidPlanError, match="prefetch chain names"):
        plan_from_json(json.dumps(document))
