"""Activation checkpoint on one GPU beside the baseline and transformers' own, in one process, on one model and batch.

python benchmarks/gpu_activation_checkpoint.py qwen3-30b-a3b --seq-length 4096 --pairs 10 --output docs/benchmarks/x.json
"""

import contextlib
import functools
import gc
import json
import statistics

import torch
from gpu_steps import arguments, nothing, prepare, timed, train_step, write
from torch.profiler import ProfilerActivity, profile

import memopt
from memopt.ir import account
from memopt.passes.activation_checkpoint import ActivationCheckpoint


@contextlib.contextmanager
def transformers_checkpoint(model, graph):
    """transformers' gradient checkpointing, not reentrant."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()


@contextlib.contextmanager
def checkpoint(model, graph, mode):
    handle = memopt.apply(model, planned(graph, mode))
    try:
        yield
    finally:
        handle.undo()


def planned(graph, mode):
    return memopt.plan(graph, passes=[ActivationCheckpoint(mode=mode)])


WARM_UP = 8
"""From the third step on a selective region watches no functions; the host comes to its pace some steps later."""

OURS = ("full", "selective", "attention-only")
MODES = {"off": nothing, "transformers": transformers_checkpoint} | {
    mode: functools.partial(checkpoint, mode=mode) for mode in OURS
}


def measure(mode, model, graph, batch, device, steps):
    """Warm up, then measure some steps."""
    with MODES[mode](model, graph):
        for _ in range(WARM_UP):
            timed(model, batch, device)
        rows = [timed(model, batch, device) for _ in range(steps)]
    gc.collect()
    return rows


def compare_gradients(stepper, model, graph, batch):
    """Return, per mode, how many gradients differ from the baseline's by a bit; the baseline's own, run again, first."""
    reference, loss = stepper.checksums(model, batch)
    found = {}
    for mode in ("off", *(name for name in MODES if name != "off")):
        with MODES[mode](model, graph):
            for _ in range(WARM_UP):
                train_step(model, batch)
            sums, other_loss = stepper.checksums(model, batch)
        different = sum(sums[name][0] != reference[name][0] for name in reference)
        found[mode] = {"different": different, "of": len(reference), "loss_equal": loss == other_loss}
    return found


def kernels(mode, model, graph, batch):
    """Return how long the GPU and the host are busy in one step, and the kernels that take longest, in milliseconds."""
    with MODES[mode](model, graph):
        for _ in range(WARM_UP):
            train_step(model, batch)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            train_step(model, batch)
            torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows)
    longest = [(row.key[:160], round(row.self_device_time_total / 1e3, 1), row.count) for row in rows[:30]]
    return {"device_ms": total / 1e3, "longest": longest}


def summary(args, model, graph, results, device):
    rows = {}
    for mode, measured in results.items():
        rows[mode] = {"peak_bytes": max(row.peak_bytes for rows in measured for row in rows)}
        rows[mode] |= {"seconds": _spread([row.seconds for rows in measured for row in rows])}
        rows[mode] |= {"forward_cpu_seconds": _spread([row.forward_cpu_seconds for rows in measured for row in rows])}
        for base in ("off", "transformers"):
            pairs = zip(measured, results[base], strict=True)
            ratios = [r.seconds / b.seconds for rows, others in pairs for r, b in zip(rows, others, strict=True)]
            rows[mode][f"ratio_to_{base}"] = _spread(ratios)
    for mode in OURS:
        totals = account(planned(graph, mode))
        rows[mode]["predicted_net_freed_bytes"] = totals.net_freed_bytes
        rows[mode]["measured_freed_bytes"] = rows["off"]["peak_bytes"] - rows[mode]["peak_bytes"]
    added = [_added(results, mode) for mode in ("full", "selective")]
    return {
        "model": args.preset, "num_layers": model.config.num_hidden_layers, "batch_size": args.batch_size,
        "seq_length": args.seq_length, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "selective_added_time_to_full": _spread([s / f for f, s in zip(*added, strict=True) if f > 0]),
        "modes": rows,
    }  # fmt: skip


def _added(results, mode):
    pairs = zip(results[mode], results["off"], strict=True)
    return [_median(rows) - _median(base) for rows, base in pairs]


def _median(rows):
    return statistics.median(row.seconds for row in rows)


def _spread(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values)} if values else None


def main():
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--kernels", action="store_true", help="also profile one step of each mode")
    args = parser.parse_args()
    device, model, batch, stepper = prepare(args)
    graph = memopt.analyze(model, batch, name=args.preset)
    gc.freeze()  # the collector need not look at the model again and again: a full collection takes a third of a second
    if args.gradients_only:
        print(json.dumps(compare_gradients(stepper, model, graph, batch)))
        return
    results = {mode: [] for mode in MODES}
    for pair in range(args.pairs):
        for mode in MODES:
            results[mode].append(measure(mode, model, graph, batch, device, steps=4))
        print(pair, {m: [round(row.seconds, 3) for row in rows[-1]] for m, rows in results.items()}, flush=True)
    report = summary(args, model, graph, results, device)
    if args.kernels and device == "cuda":
        report["kernels"] = {mode: kernels(mode, model, graph, batch) for mode in MODES}
    print(json.dumps(report, indent=1))
    write(report, args.output)


if __name__ == "__main__":
    main()
