"""Key-value caches and checkpointed regions: generation, caches that the caller brings, keys that layers share."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, PretrainedConfig

import memopt
from memopt.passes.activation_checkpoint import DOWNGRADED
from memopt.runtime.replay.cache import holds_keys
from tests import zoo
from tests.runtime.checkpoints import MODES, calls, checkpointed, collected, plan_of


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3", "gemma4", "gpt_oss", "mamba"])
def test_generation_in_train_mode_gives_the_tokens_of_eval_mode(name, mode):
    plain, inputs = zoo.ZOO[name](), zoo.batch(name, use_cache=False)
    model, handle = checkpointed(plain, mode, **inputs)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    prompt = inputs["input_ids"][:, :5]
    want = plain.eval().generate(prompt, **options)
    assert torch.equal(want, model.train().generate(prompt, **options))
    assert model.training
    assert torch.equal(want, model.eval().generate(prompt, **options))
    assert handle.stats().checkpointed_calls == 0
    plain.train(), model.train()
    assert zoo.differing(zoo.train_step(plain, inputs), zoo.train_step(model, inputs)) == []
    assert calls(handle)[0] > 0


def prefix_step(model, inputs):
    """Take a step on words that follow upon others, whose keys and values are in a cache."""
    ids = inputs["input_ids"]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :5], past_key_values=cache, use_cache=True)
    model.zero_grad()
    loss = model(ids[:, 5:], labels=ids[:, 5:], past_key_values=cache, use_cache=True).loss
    loss.backward()
    return collected(model) | {"loss": loss.detach(), "length": torch.tensor(cache.get_seq_length())}


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2", "gpt2"])
def test_a_forward_on_a_cache_with_something_in_it_is_not_checkpointed(name, mode):
    options = {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0} if name == "gpt2" else {}
    plain, inputs = zoo.ZOO[name](**options), zoo.batch(name, use_cache=False)
    model, handle = checkpointed(plain, mode, **inputs)
    want, got = prefix_step(plain, inputs), prefix_step(model, inputs)
    assert zoo.differing(want, got) == []
    assert want["length"] == zoo.SEQ_LENGTH
    assert calls(handle) == (0, 0)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3n", "gemma4", "qwen3_next", "falcon_h1", "jamba"])
def test_training_with_the_cache_on_is_training_with_it_off(name, mode):
    """A trainer leaves it on; the model's configuration stays as it is."""
    plain, inputs = zoo.ZOO[name](), zoo.batch(name, use_cache=False)
    model, handle = checkpointed(plain, mode, **inputs)
    before = copy.deepcopy(model.config.to_dict())
    assert model.config.use_cache
    want = zoo.train_step(plain, inputs)
    with_cache = {key: value for key, value in inputs.items() if key != "use_cache"}
    assert zoo.differing(want, zoo.train_step(model, with_cache)) == []
    assert zoo.differing(want, zoo.train_step(model, with_cache | {"use_cache": True})) == []
    assert model.config.to_dict() == before
    assert calls(handle)[0] == calls(handle)[1] == 2 * len(handle.plan.decisions)


def said(caplog):
    """Return what memopt said; newer versions of transformers say something of their own."""
    return [record for record in caplog.records if record.name == "memopt"]


def test_a_layer_of_which_a_cache_knows_nothing_is_not_in_it():
    """Newer versions of transformers answer no question about a layer that borrows the keys of another."""

    class Cache:
        def get_seq_length(self, layer_idx=0):
            raise ValueError("this layer is a DummyLayer")

        has_previous_state = update = get_seq_length

    layer = nn.Linear(4, 4)
    layer.layer_idx = 2
    assert not holds_keys(layer, (torch.ones(1), Cache()), {})


def test_a_cache_that_stays_empty_is_told_of_once_for_each_model(mode, caplog):
    inputs = {"input_ids": zoo.batch("llama")["input_ids"]}
    for number in (1, 2):
        model, _ = checkpointed(zoo.ZOO["llama"](), mode, **inputs, use_cache=False)
        model(**inputs, use_cache=False)
        assert len(said(caplog)) == number - 1
        for _ in range(2):
            assert model(**inputs, use_cache=True).past_key_values.get_seq_length() == 0
            assert len(said(caplog)) == number
    assert "use_cache=True is incompatible with activation checkpointing" in caplog.text
    assert "pass use_cache=False" in caplog.text


def test_a_cache_that_holds_keys_is_told_of_once(mode, caplog):
    """PEFT's prefix tuning brings one to every forward, so that nothing is ever checkpointed."""
    inputs = zoo.batch("llama", use_cache=False)
    model, handle = checkpointed(zoo.ZOO["llama"](), mode, **inputs)
    for _ in range(2):
        prefix_step(model, inputs)
        assert len(said(caplog)) == 1
    assert (
        "layers whose cache holds keys already (a prefix, a prompt), or is read by other layers, are not checkpointed"
        in caplog.text
    )
    assert calls(handle) == (0, 0)


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_keys_shared_through_a_dict_need_no_downgrade(name, mode):
    plain, inputs = zoo.ZOO[name](), zoo.batch(name, use_cache=False)
    assert plain.config.num_kv_shared_layers == 2
    model, handle = checkpointed(plain, mode, **inputs)
    assert DOWNGRADED not in handle.plan.notes
    assert len(handle.plan.decisions) == plain.config.num_hidden_layers, "whole layers"
    for seed in range(3):
        want = zoo.train_step(plain, inputs, seed)
        assert zoo.differing(want, zoo.train_step(model, inputs, seed)) == []
    assert calls(handle) == (12, 12)


class Config(PretrainedConfig):
    num_kv_shared_layers = 1


class Attention(nn.Module):
    """Attention that takes keys and values from the cache in the layers that share them."""

    def __init__(self, index, source):
        super().__init__()
        self.index, self.source = index, source
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x, past_key_values=None):
        def heads(y):
            return y.unflatten(-1, (2, 8)).transpose(1, 2)

        if self.source is None:
            k, v = past_key_values.update(heads(self.key(x)), heads(self.value(x)), self.index)
        else:
            layer = past_key_values.layers[self.source]
            k, v = layer.keys, layer.values
        y = F.scaled_dot_product_attention(heads(self.query(x)), k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, index, source):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(16), nn.LayerNorm(16)
        self.self_attn = Attention(index, source)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x, past_key_values=None):
        x = x + self.self_attn(self.input_layernorm(x), past_key_values=past_key_values)
        return x + self.mlp(self.post_attention_layernorm(x))


class SharesThroughCache(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.config = Config()
        self.layers = nn.ModuleList([Layer(0, None), Layer(1, None), Layer(2, 1)])

    def forward(self, x):
        cache = DynamicCache()
        for layer in self.layers:
            x = layer(x, past_key_values=cache)
        return x.square().mean()


def test_keys_shared_through_the_cache_leave_attention_alone(mode):
    plain, x = SharesThroughCache(), torch.randn(2, 6, 16)
    plan = plan_of(memopt.analyze(plain, (x,)), mode)
    downgraded = [note for note in plan.notes if "selective checkpointing is downgraded" in note]
    assert len(downgraded) == (mode == "selective")
    parts = {key.fqn.partition(".")[2].partition(".")[2] for key in plan.decisions}
    assert parts == {"mlp", "input_layernorm", "post_attention_layernorm"}
    assert len(plan.decisions) == 3 * 3
    assert {decision.policy for decision in plan.decisions.values()} == {"full"}
    model = copy.deepcopy(plain)
    handle = memopt.apply(model, plan)
    for _ in range(2):
        results = []
        for one in (plain, model):
            one.zero_grad()
            loss = one(x)
            loss.backward()
            results.append(collected(one) | {"loss": loss.detach()})
        assert zoo.differing(*results) == []
    assert results[0]["layers.1.self_attn.key.weight"].abs().sum() > 0
    assert results[0]["layers.2.self_attn.key.weight"] is None
    assert calls(handle) == (18, 18)
