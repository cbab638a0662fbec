"""Predicted memory against measured, on one GPU: every mode, peak, copied bytes, and how long forward takes.

    python benchmarks/gpu_predict.py qwen3-30b-a3b:1024 qwen3-30b-a3b:4096 qwen3-8b:8192 --output docs/benchmarks/x.json

Predictions run in processes of their own beside the measurements; optimizer steps are taken in backward (SGD).
"""

import argparse
import gc
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from gpu_steps import build, config_of, paradigm_of, timed, train_step, write

STEPS = 3


def modes(preset):
    return {
        "off": None,
        "attention swap": {"activation_swap": "attention"},
        "full": {"activation_checkpoint": "full"},
        "selective": {"activation_checkpoint": "selective"},
        "paradigm": paradigm_of(preset),
    }


def predicted(preset, num_layers, seq_length, mode, device_type):
    """Return the prediction of a mode and how long it took: the work of a process of its own."""
    import memopt
    from memopt.ir import DEVICES, Phase

    torch.set_num_threads(1)
    began = time.perf_counter()
    config = config_of(preset, num_layers)
    graph = memopt.analyze(config, batch_size=1, seq_length=seq_length, target_device=device_type)
    plan = memopt.plan(graph, modes(preset)[mode])
    memory = memopt.predict(plan, config, optimizer="sgd", grad_in_backward=True, device=DEVICES["h200"])
    return {
        "low_bytes": memory.planned_low_bytes,
        "high_bytes": memory.planned_high_bytes,
        "copied_out_bytes": memory.copied_out_bytes,
        "host_pinned_bytes": memory.host_pinned_bytes,
        "peak_at": [memory.step.peak.module, memory.step.peak.op],
        "forward_us": memory.baseline.us_of(Phase.FORWARD),
        "backward_us": memory.baseline.us_of(Phase.BACKWARD),
        "seconds": time.perf_counter() - began,
    }


def measured(model, batch, graph, config, device):
    """Return peak, copied bytes and times of some steps of a mode."""
    import memopt

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()  # blocks of another mode's sizes would be used whole for smaller tensors
    handle = memopt.apply(model, memopt.plan(graph, config)) if config else None
    for _ in range(3):
        train_step(model, batch)
    before = handle.stats().copied_out_bytes if handle else 0
    steps = [timed(model, batch, device) for _ in range(STEPS)]
    copied = (handle.stats().copied_out_bytes - before) // STEPS if handle else 0
    row = {"peak_bytes": max(step.peak_bytes for step in steps), "copied_out_bytes": copied}
    row["requested_peak_bytes"] = (
        torch.cuda.memory_stats().get("requested_bytes.all.peak", 0) if device == "cuda" else 0
    )
    row["reserved_peak_bytes"] = torch.cuda.max_memory_reserved() if device == "cuda" else 0
    row["seconds"] = statistics.median(step.seconds for step in steps)
    row["forward_seconds"] = forward_seconds(model, batch)
    if handle:
        handle.undo()
    gc.collect()
    return row


def forward_seconds(model, batch):
    """Return how long a forward takes, with all it asked of the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    loss = model(**batch).loss
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    took = time.perf_counter() - began
    loss.backward()
    return took


def update_in_backward(model):
    """Step as each gradient is ready, with a learning rate of 0."""

    def step(parameter):
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.0)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def compare(prediction, row):
    """Return how far a measurement lies from the predicted interval, and how wide that is."""
    peak = row["peak_bytes"]
    outside = max(prediction["low_bytes"] - peak, peak - prediction["high_bytes"], 0)
    return {
        "error_percent": 100 * outside / peak if peak else 0.0,
        "interval_gib": (prediction["high_bytes"] - prediction["low_bytes"]) / 2**30,
        "copies_equal": prediction["copied_out_bytes"] == row["copied_out_bytes"],
    }


def work_of(text, num_layers, device, predictions):
    import memopt

    preset, _, length = text.partition(":")
    model = build(preset, num_layers, device)
    update_in_backward(model)
    ids = torch.randint(0, model.config.vocab_size, (1, int(length)), device=device)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    graph = memopt.analyze(model, batch, name=preset)
    for mode, config in modes(preset).items():
        row = measured(model, batch, graph, config, device)
        prediction = predictions[text, mode].result()
        yield mode, {"predicted": prediction, "measured": row, **compare(prediction, row)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="+", metavar="PRESET:SEQ_LENGTH")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report = {"torch": torch.__version__, "works": {}}
    if device == "cuda":
        from memopt.predict.measure import measure_device

        report["device"] = measured_device = measure_device(torch.device("cuda")).as_dict()
        print(json.dumps(measured_device), flush=True)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=spawn) as pool:
        predictions = {
            (work, mode): pool.submit(predicted, *work_args(work, args.num_layers), mode, device)
            for work in args.works
            for mode in modes(work)
        }
        for work in args.works:
            for mode, row in work_of(work, args.num_layers, device, predictions):
                report["works"].setdefault(work, {})[mode] = row
                print(work, mode, json.dumps(row), flush=True)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    write(report, args.output)


def work_args(work, num_layers):
    preset, _, length = work.partition(":")
    return preset, num_layers, int(length)


if __name__ == "__main__":
    main()
