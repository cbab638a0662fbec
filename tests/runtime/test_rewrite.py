"""Rewriting a live model: names, keys, copies, patches and undo."""

import copy
import functools
import io
import pickle
import re
import types

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn

import memopt
from memopt.errors import IncompatibleError, PlanMismatchError, RequestError, RewriteError
from memopt.runtime import apply as runtime_apply
from memopt.runtime.rewrite import is_rewritten, restore_module, rewritten_class
from tests import models
from tests.runtime.steps import SWAP, assert_equal_steps, step


@pytest.fixture
def inputs():
    return models.hidden()


def rewritten(inputs, seed=0):
    model = models.SharedAttention(seed)
    return model, memopt.apply(model, SWAP, inputs)


def swapped_out(handle):
    """Return how many tensors were copied since: proof that the rewriting took part."""
    return handle.stats().copied_out_tensors


def test_names_keys_classes_and_repr(inputs):
    plain = models.SharedAttention()
    model, _ = rewritten(inputs)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    attention = model.blocks[0].self_attn
    assert isinstance(attention, models.Attention)
    assert type(attention).__name__ == type(attention).__qualname__ == "Attention"
    assert type(attention).__module__ == models.Attention.__module__
    assert "Attention[attention swap]" in repr(model)


def test_the_same_plan_twice_adds_nothing_and_another_is_an_error(inputs):
    model, handle = rewritten(inputs)
    classes = [type(m) for m in model.modules()]
    memopt.apply(model, handle.plan)
    memopt.apply(model, SWAP, inputs)
    assert [type(m) for m in model.modules()] == classes
    nothing = memopt.plan(handle.plan.graph, activation_swap="none")
    with pytest.raises(RewriteError, match=r"memopt\.undo"):
        memopt.apply(model, nothing)
    assert_equal_steps(models.SharedAttention(), model, inputs, steps=1)


def test_undo_by_handle_and_without_it(inputs):
    model, handle = rewritten(inputs)
    loss = model(inputs)
    handle.undo()
    assert type(model.blocks[0].self_attn) is models.Attention
    assert not [key for m in model.modules() for key in m.__dict__ if key.startswith("_memopt")]
    loss.backward()  # what was saved before the undo comes back right
    plain = models.SharedAttention()
    plain(inputs).backward()
    for grad, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(grad.grad, other.grad)
    memopt.apply(model, SWAP, inputs)
    memopt.undo(model)
    assert type(model.blocks[0].self_attn) is models.Attention


def test_undo_leaves_a_class_that_was_put_on_top(inputs):
    model, _ = rewritten(inputs)
    attention = model.blocks[1].self_attn

    class OnTop:
        marker = "on top"

    base = type(attention)
    attention.__class__ = type("Top", (OnTop, base), {})
    memopt.undo(model)
    assert attention.marker == "on top"
    assert type(attention).__mro__[:3] == (type(attention), OnTop, models.Attention)
    assert_equal_steps(models.SharedAttention(), model, inputs, steps=1)


@pytest.mark.parametrize("compiles", [False, True])
def test_undo_below_a_class_whose_forward_was_wrapped_as_it_was_put_on_top(compiles):
    """So does GradientCheckpointingLayer in newer versions of transformers, also with the classes that FSDP2 makes."""

    class Wrapping(nn.Module):
        def __init_subclass__(cls):
            forward = cls.forward

            @functools.wraps(forward)
            def wrapped(self, x):
                return forward(self, x)

            cls.forward = wrapped

    class Layer(Wrapping):
        def forward(self, x):
            return x + 1

    layer = Layer()
    layer.__class__ = type("Top", (rewritten_class(Layer, compiles),), {"marker": "on top"})
    assert layer(1) == 2
    restore_module(layer)
    assert (layer(1), layer.marker, is_rewritten(layer)) == (2, "on top", False)


def test_undo_keeps_a_forward_that_a_class_was_given_around_ours():
    class Layer(nn.Module):
        def forward(self, x):
            return x + 1

    layer = Layer()
    layer.__class__ = rewritten_class(Layer, False)
    below = type(layer)
    around = functools.wraps(below.forward)(lambda self, x: 20 * x)
    layer.__class__ = type("Patched", (below,), {"forward": around})
    assert layer(1) == 20
    restore_module(layer)
    assert layer(1) == 20
    assert not is_rewritten(layer)


def fused(self, x):
    return models.Attention.forward(self, x) * 2


class Double(ModelHook):
    def pre_forward(self, module, *args, **kwargs):
        return tuple(arg * 2 for arg in args), kwargs


def patch(attention):
    attention.forward = types.MethodType(fused, attention)


def hook(attention):
    add_hook_to_module(attention, Double())


@pytest.mark.parametrize("change", [patch, hook])
@pytest.mark.parametrize("order", ["before", "after"])
def test_an_instance_level_forward_counts_and_is_swapped(inputs, change, order):
    plain, model = models.SharedAttention(), models.SharedAttention()
    change(plain.blocks[1].self_attn)
    if order == "before":
        change(model.blocks[1].self_attn)
    handle = memopt.apply(model, SWAP, inputs)
    if order == "after":
        change(model.blocks[1].self_attn)
    out = swapped_out(handle)
    assert_equal_steps(plain, model, inputs)
    assert swapped_out(handle) > out


def test_a_hook_taken_off_again_stays_off(inputs):
    plain, model = models.SharedAttention(), models.SharedAttention()
    handle = memopt.apply(model, SWAP, inputs)
    for late in (plain, model):
        add_hook_to_module(late.blocks[1].self_attn, Double())
        remove_hook_from_module(late.blocks[1].self_attn)
    assert_equal_steps(plain, model, inputs)
    assert swapped_out(handle) > 0
    del model.blocks[1].self_attn.forward
    assert_equal_steps(plain, model, inputs)
    memopt.undo(model)
    assert_equal_steps(plain, model, inputs)


def test_a_deep_copy_trains_on_its_own(inputs):
    model, handle = rewritten(inputs)
    copied = copy.deepcopy(model)
    before = swapped_out(handle)
    plain = models.SharedAttention()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, copied)]
    for _ in range(2):
        assert_equal_steps(plain, copied, inputs, steps=1)
        for optimizer in optimizers:
            optimizer.step()
    assert swapped_out(handle) == before, "the original took no part"
    assert memopt.apply(copied, handle.plan).stats().copied_out_tensors > 0
    assert_equal_steps(models.SharedAttention(), model, inputs)
    memopt.undo(copied)
    assert type(model.blocks[0].self_attn) is not models.Attention


def test_one_layer_copied_alone_takes_no_neighbor_along(inputs):
    model, _ = rewritten(inputs)
    alone = copy.deepcopy(model.blocks[1].self_attn)
    assert alone.__dict__["_memopt_previous"].module is None
    alone(inputs).sum().backward()


@pytest.mark.parametrize("save", ["pickle", "torch"])
def test_the_whole_model_survives_saving(inputs, save):
    model, handle = rewritten(inputs)
    if save == "pickle":
        back = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        back = torch.load(buffer, weights_only=False)
    assert type(back.blocks[0].self_attn) is type(model.blocks[0].self_attn)
    assert back.blocks[0].self_attn is back.blocks[2].self_attn
    assert_equal_steps(models.SharedAttention(), back, inputs)
    assert memopt.apply(back, handle.plan).stats().copied_out_tensors > 0


def test_state_dicts_load_both_ways_and_training_resumes_identically(inputs):
    plain, (model, _) = models.SharedAttention(seed=1), rewritten(inputs)
    plain.load_state_dict(model.state_dict(), strict=True)
    assert_equal_steps(plain, model, inputs)
    model.load_state_dict(models.SharedAttention(seed=2).state_dict(), strict=True)
    assert_equal_steps(models.SharedAttention(seed=2), model, inputs)


def test_save_pretrained_and_back(tmp_path):
    inputs = models.batch()
    plain, model = models.llama(), models.llama()
    handle = memopt.apply(model, SWAP, inputs)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).train()
    assert_equal_steps(plain, again, inputs, steps=1)
    memopt.apply(again, handle.plan)
    assert_equal_steps(plain, again, inputs, steps=1)


def test_a_plan_for_another_model_is_refused(inputs):
    _, handle = rewritten(inputs)
    with pytest.raises(PlanMismatchError, match=r"'blocks\.0\.self_attn' it expects Attention"):
        memopt.apply(models.llama(), handle.plan)


def test_a_plan_for_fewer_layers_is_refused():
    plan = memopt.plan(memopt.analyze(models.llama(num_hidden_layers=2), models.batch(seq_length=512)), **SWAP)
    with pytest.raises(PlanMismatchError, match=r"knows nothing of 'model\.layers\.2\.self_attn'"):
        memopt.apply(models.llama(num_hidden_layers=3), plan)


def test_the_handle_counts_its_own_and_can_be_read_after_undo(inputs):
    model, handle = rewritten(inputs)
    step(model, inputs)
    counted = handle.stats()
    handle.undo()
    assert handle.stats() == counted
    assert counted.copied_out_tensors > 0
    assert memopt.apply(model, SWAP, inputs).stats().registered_tensors == 0
    assert repr(handle) == "<Rewriting of 2 modules of SharedAttention>"


def test_wrong_configurations_name_the_legal_ones(inputs):
    graph = memopt.analyze(models.SharedAttention(), inputs)
    with pytest.raises(RequestError, match="'activation_swp'; did you mean 'activation_swap'"):
        memopt.plan(graph, activation_swp="attention")
    legal = "is not legal; legal: a mapping like .*, a memopt.Config or a Plan"
    for value, shown, way_out in (
        ("attention", "'attention'", "write {'activation_swap': 'attention'}"),
        ("full", "'full'", "write {'activation_checkpoint': 'full'}"),
        ("memopt.yaml", "'memopt.yaml'", "memopt.config.load_config(path), a saved plan with memopt.load_plan(path)"),
        (graph, ".*ModuleGraph'>", "memopt.plan(graph) makes a plan"),
        (3, "<class 'int'>", ""),
    ):
        with pytest.raises(RequestError, match=f"config={shown} {legal}.*{re.escape(way_out)}$"):
            memopt.apply(models.SharedAttention(), value)


def test_passes_exclude_a_configuration(inputs):
    graph = memopt.analyze(models.SharedAttention(), inputs)
    assert memopt.plan(graph, memopt.Config(), passes=["attention-swap"]).decisions
    with pytest.raises(RequestError, match="not both: activation_checkpoint='selective' and enable_compile=True would"):
        memopt.plan(graph, passes=["attention-swap"], activation_checkpoint="selective", enable_compile=True)


def test_a_failure_half_way_restores_everything(inputs, monkeypatch):
    model = models.SharedAttention()
    plan = memopt.plan(memopt.analyze(model, inputs), **SWAP)
    rewrite, seen = runtime_apply.rewrite_module, []

    def failing(module, region):
        if seen:
            raise KeyboardInterrupt
        seen.append(module)
        rewrite(module, region)

    monkeypatch.setattr(runtime_apply, "rewrite_module", failing)
    with pytest.raises(KeyboardInterrupt):
        memopt.apply(model, plan)
    assert seen
    assert all(type(m) is models.Attention for m in (model.blocks[0].self_attn, model.blocks[1].self_attn))
    assert_equal_steps(models.SharedAttention(), model, inputs, steps=1)


def test_a_rewriting_that_loses_a_parameter_is_caught_and_taken_back(inputs, monkeypatch):
    model = models.SharedAttention()
    plan = memopt.plan(memopt.analyze(model, inputs), **SWAP)
    rewrite = runtime_apply.rewrite_module

    def losing(module, region):
        rewrite(module, region)
        module.extra = nn.Linear(1, 1)

    monkeypatch.setattr(runtime_apply, "rewrite_module", losing)
    with pytest.raises(RewriteError, match=r"state_dict keys: blocks\.0\.self_attn\.extra\.bias"):
        memopt.apply(model, plan)
    assert type(model.blocks[0].self_attn) is models.Attention


def test_gradient_checkpointing_excludes_it():
    model, inputs = models.llama(), models.batch(seq_length=512)
    plan = memopt.plan(memopt.analyze(model, inputs), **SWAP)
    model.gradient_checkpointing_enable()
    with pytest.raises(IncompatibleError, match="incompatible with activation checkpointing"):
        memopt.apply(model, plan)
    model.gradient_checkpointing_disable()
    memopt.apply(model, plan)
    step(model, inputs)


def test_peft_on_top_and_below(inputs):
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    batch = models.batch()

    def with_lora(model):
        torch.manual_seed(5)
        return get_peft_model(model, lora)

    plain = with_lora(models.llama())
    below = models.llama()
    handle = memopt.apply(below, SWAP, batch)
    below = with_lora(below)
    assert list(below.state_dict()) == list(plain.state_dict())
    assert_equal_steps(plain, below, batch)
    assert swapped_out(handle) > 0
    on_top = with_lora(models.llama())
    handle = memopt.apply(on_top, SWAP, batch)
    assert_equal_steps(plain, on_top, batch)
    assert swapped_out(handle) > 0
