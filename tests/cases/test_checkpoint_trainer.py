"""The stock Trainer with a checkpointed model: the same losses and weights, bit for bit."""

import pytest
from transformers import Trainer, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

import memopt
from memopt.errors import IncompatibleError
from tests.cases.rewriting import assert_identical, batch, small_llama, stats_of

MODES = ("full", "selective")
STEPS, ACCUMULATED, LAYERS = 3, 2, 2
IN_FORWARD = "__call__" not in vars(GradientCheckpointingLayer)


def fitted(model, folder, **options):
    """Train three steps of two batches each; return the losses and the weights."""
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
        gradient_accumulation_steps=ACCUMULATED, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        seed=1, **options,
    )  # fmt: skip
    rows = batch(9, batch_size=16)["input_ids"]
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_fits_alike(model, folder, **options):
    losses, weights = fitted(small_llama(attention_dropout=0.1), folder)
    other_losses, other_weights = fitted(model, folder, **options)
    assert losses == other_losses
    assert len(losses) == STEPS
    assert_identical(weights, other_weights)


def model_with(mode, inputs=None):
    model = small_llama(attention_dropout=0.1)
    memopt.apply(model, {"activation_checkpoint": mode}, inputs)
    return model


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("when", ["before", "first forward"])
def test_it_trains_as_without(mode, when, tmp_path):
    model = model_with(mode, batch(9) if when == "before" else None)
    assert_fits_alike(model, tmp_path)
    stats = stats_of(model)
    assert stats.replayed_calls == stats.checkpointed_calls == STEPS * ACCUMULATED * LAYERS


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_that_the_trainer_turns_on_on_top_is_exact(mode, reentrant, tmp_path):
    """The regions leave it to torch; inside a reentrant checkpoint they work once it runs the layer with gradients.

    Where transformers checkpoints in a layer's forward, only if that is the outermost one, it leaves it to the regions.
    """
    model = model_with(mode, batch(9))
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    assert_fits_alike(model, tmp_path, **options)
    assert stats_of(model).replayed_calls == (STEPS * ACCUMULATED * LAYERS if reentrant or IN_FORWARD else 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_where_it_was_on_before_the_first_forward_that_is_said(mode, reentrant, tmp_path):
    """It was said that the layers save nothing, and that they should be trained."""
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    with pytest.raises(IncompatibleError, match="leave gradient_checkpointing out of the TrainingArguments"):
        fitted(model_with(mode), tmp_path, **options)


@pytest.mark.parametrize("mode", MODES)
def test_where_it_is_on_already_a_configuration_is_refused_before_the_trace(mode):
    model = small_llama()
    model.gradient_checkpointing_enable()
    for inputs in (None, batch(9)):
        with pytest.raises(IncompatibleError, match="gradient_checkpointing_disable"):
            memopt.apply(model, {"activation_checkpoint": mode}, inputs)
