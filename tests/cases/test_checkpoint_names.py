"""A model that is checkpointed by its configuration keeps its names, its outputs and its adapters."""

import copy
import io

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM

import memopt
from memopt.runtime.rewrite import is_rewritten
from tests import zoo
from tests.cases.rewriting import assert_at_work, assert_identical, assert_trains_alike, loss_on, trained
from tests.runtime.engines import total_stats

MODES = ("full", "selective")
NAMES = ("llama", "qwen3_moe")
PARTS = ["model.layers.{}." + part for part in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")]


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


def batch(name="llama"):
    return zoo.batch(name, use_cache=False)


def checkpointed(model, mode, name="llama"):
    memopt.apply(model, {"activation_checkpoint": mode}, batch(name))
    return model


def pair(name, mode, **options):
    return zoo.ZOO[name](**options), checkpointed(zoo.ZOO[name](**options), mode, name)


@pytest.mark.parametrize("name", NAMES)
def test_names_classes_and_the_printed_model(name, mode):
    plain, model = pair(name, mode)
    for kind in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        assert [key for key, _ in getattr(model, kind)()] == [key for key, _ in getattr(plain, kind)()]
    assert list(model.state_dict()) == list(plain.state_dict())
    for (_, one), (_, other) in zip(plain.named_modules(), model.named_modules(), strict=True):
        assert isinstance(other, type(one))
        assert type(other).__name__ == type(one).__name__
    (layer,) = {type(one).__name__ for one in plain.model.layers}
    marked = f"{layer}[{mode} recompute]"
    assert repr(model).count(marked) == 1  # torch folds equal layers: (0-1): 2 x ...
    assert repr(model).replace(marked, layer) == repr(plain)
    assert_trains_alike(plain, model, loss_on(batch(name)))
    assert_at_work(model)


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded_again(name, mode, tmp_path):
    plain, model = pair(name, mode)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(loaded) is type(plain)
    assert not any(map(is_rewritten, loaded.modules()))
    plain.save_pretrained(tmp_path / "plain")
    assert (tmp_path / "config.json").read_text() == (tmp_path / "plain" / "config.json").read_text()
    assert_trains_alike(model, checkpointed(loaded.train(), mode, name), loss_on(batch(name)))
    assert_at_work(loaded)


@pytest.mark.parametrize(
    ("name", "options", "asked"),
    [
        ("llama", {}, "hidden_states"),
        ("llama", {"attn_implementation": "eager"}, "attentions"),
        ("qwen3_moe", {}, "hidden_states"),
        ("qwen3_moe", {}, "router_logits"),
        ("qwen3_moe", {"attn_implementation": "eager"}, "attentions"),
    ],
)
def test_what_is_put_out_beside_the_loss(name, options, asked, mode):
    """Equal, and trained through: it is a part of the loss here."""
    plain, model = pair(name, mode, **options)
    inputs = batch(name) | {f"output_{asked}": True}
    seen = []

    def loss_of(one):
        torch.manual_seed(0)
        output = one(**inputs)
        seen.append(output[asked])
        return output.loss + sum(part.float().square().mean() for part in output[asked])

    assert_trains_alike(plain, model, loss_of)
    half = len(seen) // 2
    assert half == 3
    for want, got in zip(seen[::2], seen[1::2], strict=True):
        assert len(want) == len(got) >= 2
        assert all(map(torch.equal, want, got))
    assert_at_work(model)


@pytest.mark.parametrize("way", ["deepcopy", "torch.save"])
def test_a_copy_is_on_its_own(way, mode):
    plain, model = pair("llama", mode)
    trained(model, loss_on(batch()))  # a call that learns, and leaves gradients
    model.zero_grad()
    if way == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert not set(other.modules()) & set(model.modules())
    before = total_stats(model)
    assert_trains_alike(plain, other, loss_on(batch()))
    assert_at_work(other)
    assert total_stats(model) == before
    assert all(p.grad is None for p in model.parameters())
    memopt.undo(other)
    assert [type(m) for m in other.modules()] == [type(m) for m in plain.modules()]
    assert_trains_alike(plain, other, loss_on(batch()))
    assert any(map(is_rewritten, model.modules()))
    assert_trains_alike(plain, model, loss_on(batch()))
    assert total_stats(model).replayed_calls > before.replayed_calls


def adapted(model):
    torch.manual_seed(5)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model, config).train()


@pytest.mark.parametrize("order", ["adapters first", "checkpointing first"])
def test_lora_with_a_frozen_base(order, mode):
    plain, model = adapted(zoo.ZOO["llama"]()), zoo.ZOO["llama"]()
    if order == "adapters first":
        model = adapted(model)
        plan = memopt.plan(memopt.analyze(model, batch()), activation_checkpoint=mode)
        routes = {decision.route for decision in plan.decisions.values()}
        assert routes == ({"submodule"} if mode == "full" else {"layer"})
        memopt.apply(model, plan)
    else:
        model = adapted(checkpointed(model, mode))
    assert list(get_peft_model_state_dict(model)) == list(get_peft_model_state_dict(plain))
    assert model.targeted_module_names == plain.targeted_module_names
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, p in plain.named_parameters() if p.requires_grad
    }
    assert_trains_alike(plain, model, loss_on(batch()))
    assert_at_work(model)
    want, got = plain.merge_and_unload(), model.merge_and_unload()
    assert_identical(want.state_dict(), got.state_dict())


def test_full_takes_parts_where_layers_are_frozen():
    """Of the first layer the first norm saves nothing, as no gradient reaches it."""
    model = adapted(zoo.ZOO["llama"]())
    plan = memopt.plan(memopt.analyze(model, batch()), activation_checkpoint="full")
    prefix = "base_model.model."
    want = {prefix + part.format(number) for number in range(2) for part in PARTS} - {prefix + PARTS[2].format(0)}
    assert {key.fqn for key in plan.decisions} == want


@pytest.mark.parametrize("frozen", ["model.layers.0", "model.embed_tokens", "mlp"])
def test_partly_frozen_models(frozen, mode):
    plain, model = (zoo.ZOO["llama"]() for _ in range(2))
    for one in (plain, model):
        for name, p in one.named_parameters():
            p.requires_grad_(frozen not in name)
    checkpointed(model, mode)
    assert_trains_alike(plain, model, loss_on(batch()))
    assert_at_work(model)
