"""Longer stretches of training: resumed, scaled, with an optimizer, in a Trainer."""

import copy

import torch

import memopt
from tests import models
from tests.runtime.steps import SWAP, assert_equal_gradients


def trained(model, optimizer, seeds):
    for seed in seeds:
        optimizer.zero_grad()
        model(models.hidden(seed=seed)).backward()
        optimizer.step()
    return dict(model.named_parameters())


def test_resumed_training_is_identical():
    plain = models.SharedAttention()
    through = trained(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), range(4))
    model = models.SharedAttention()
    handle = memopt.apply(model, SWAP, models.hidden())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trained(model, optimizer, range(2))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again = models.SharedAttention(seed=9)
    memopt.apply(again, handle.plan)
    again.load_state_dict(saved[0])
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-3)
    optimizer.load_state_dict(saved[1])
    assert_equal_gradients(through, trained(again, optimizer, range(2, 4)))


def test_grad_scaler():
    results = []
    for wrapped in (False, True):
        model = models.SharedAttention()
        handle = memopt.apply(model, SWAP) if wrapped else None
        scaler = torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for seed in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(models.hidden(seed=seed, seq_length=1024))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append(dict(model.named_parameters()))
    assert_equal_gradients(*results)
    assert handle.stats().copied_out_tensors > 0


def test_the_trainer_of_transformers(tmp_path):
    from transformers import Trainer, TrainingArguments

    def rows(num):
        ids = models.batch(batch_size=num, seq_length=512)["input_ids"]
        return [{"input_ids": row, "labels": row} for row in ids]

    results = []
    for wrapped in (False, True):
        model = models.llama(num_hidden_layers=2)
        handle = memopt.apply(model, SWAP) if wrapped else None
        arguments = TrainingArguments(
            output_dir=tmp_path / str(wrapped), max_steps=3, per_device_train_batch_size=2, use_cpu=True, seed=1,
            gradient_accumulation_steps=2, report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
            eval_strategy="steps", eval_steps=2, max_grad_norm=0.5,
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=rows(12), eval_dataset=rows(2)).train()
        results.append(dict(model.named_parameters()))
    assert_equal_gradients(*results)
    assert handle.stats().copied_out_tensors > 0
