"""What goes on between training steps: generation, evaluation, unfreezing, saving."""

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DynamicCache,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

from tests import models
from tests.cases.rewriting import (
    assert_at_work,
    assert_identical,
    assert_trains_alike,
    batch,
    loss_on,
    small_llama,
    stats_of,
    twin,
)


def continued(model, prompt):
    """Return greedy tokens, how full the cache got, and logits without gradients."""
    cache = DynamicCache(config=model.config)
    tokens = model.generate(prompt, past_key_values=cache, max_new_tokens=6, do_sample=False, pad_token_id=0)
    with torch.inference_mode():
        logits = model(prompt).logits.clone()
    return {"tokens": tokens, "cache": torch.tensor(cache.get_seq_length()), "logits": logits}


def test_generation_between_steps_in_either_mode(grain):
    """After training with memory features on, generation lost its cache (huggingface/transformers#36051)."""
    plain = small_llama(eos_token_id=None)
    model = twin(plain, grain)
    prompt = batch(7)["input_ids"]
    for training in (True, False):
        assert_trains_alike(plain.train(), model.train(), loss_on(batch(7, use_cache=None)))
        before = stats_of(model)
        want, got = (continued(m.train(training), prompt) for m in (plain, model))
        assert_identical(want, got)
        assert got["cache"] == 7 + 6 - 1
        assert stats_of(model) == before, "nothing is saved where nothing is trained"
        assert model.training == training
    assert_trains_alike(plain.train(), model.train(), loss_on(batch(7)))
    assert model.config.to_dict() == plain.config.to_dict()
    assert_at_work(model)


def test_layers_that_are_unfrozen_later(grain):
    """Layers thawed after the rewriting never trained, since it had looked once (modelscope/ms-swift#10214)."""
    torch.manual_seed(0)
    plain = BertForSequenceClassification(
        BertConfig(
            hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, vocab_size=models.VOCAB,
            num_labels=3,
        )
    ).train()  # fmt: skip
    model = twin(plain.requires_grad_(False), grain)
    inputs = {"input_ids": batch(batch_size=4)["input_ids"], "labels": torch.tensor([0, 2, 1, 0])}
    worked = []
    for thawed in ("classifier", "layer.2", "layer.0.attention", "bias", ""):
        for module in (plain, model):
            for name, p in module.named_parameters():
                p.requires_grad_("classifier" in name or thawed in name)
        assert_trains_alike(plain, model, loss_on(inputs), steps=2)
        stats = stats_of(model)
        worked.append(stats.copied_out_tensors + stats.replayed_calls - sum(worked))
    assert worked[0] == 0, "all regions are frozen"
    assert 0 < worked[1] < worked[2] <= worked[-1]
    assert_at_work(model)


def fitted(model, data, folder):
    """Train with accumulation, clipping and evaluation; return what is loaded from what is saved."""
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-2, eval_strategy="steps", eval_steps=2, save_strategy="no", logging_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True, seed=1,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:3])
    trainer.train()
    trainer.save_model(str(folder))
    return GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)


def test_the_stock_trainer_accumulates_evaluates_and_saves(grain, tmp_path):
    """It stopped at a tracker that was not cleared (huggingface/trl#4236)."""
    plain = models.gpt2(n_embd=32, n_layer=2, n_positions=32)
    model = twin(plain, grain)
    rows = batch(9, batch_size=16)["input_ids"]
    data = [{"input_ids": row, "labels": row} for row in rows]
    start = {name: p.detach().clone() for name, p in plain.named_parameters()}
    loaded, _ = fitted(plain, data, tmp_path / "plain")
    other, info = fitted(model, data, tmp_path / "rewritten")
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_identical(loaded.state_dict(), other.state_dict())
    assert not all(torch.equal(p, start[name]) for name, p in other.named_parameters())
    assert_at_work(model)
    assert_trains_alike(plain, model, loss_on(batch()))
