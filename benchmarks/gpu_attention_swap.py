"""Attention swap on one GPU beside the baseline and save_on_cpu, in one process, on the same model and batch.

The optimizer steps in backward with a learning rate of 0: each gradient is made, used and dropped as in real training
that barely fits, yet the weights stay as they are, so that the gradients of all modes can be compared by checksum.

    python benchmarks/gpu_attention_swap.py qwen3-30b-a3b --seq-length 4096 --pairs 10 --output docs/benchmarks/x.json
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
from memopt.ir import Plan, account
from memopt.passes import AttentionSwap, Pipeline, PrefetchChain
from memopt.runtime.engine import engine_of


@contextlib.contextmanager
def attention_swap(model, plan, margin_bytes=None):
    """Swap what attention saves; a wider margin keeps more of the last layers, so that the copies fit the window."""
    if margin_bytes is not None:
        plan = Pipeline([AttentionSwap(margin_bytes=margin_bytes), PrefetchChain()]).run(Plan(graph=plan.graph))
    handle = memopt.apply(model, plan)
    try:
        yield handle
    finally:
        handle.undo()


@contextlib.contextmanager
def save_on_cpu(model, plan):
    """torch's own offload around each self_attn: copies weights too, and waits for every copy."""
    attentions = [layer.self_attn for layer in model.model.layers]
    for attention in attentions:
        attention.forward = _saving_on_cpu(attention.forward)
    try:
        yield None
    finally:
        for attention in attentions:
            del attention.forward


def _saving_on_cpu(forward):
    def run(*args, **kwargs):
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return forward(*args, **kwargs)

    return run


MODES = {
    "nothing": nothing,
    "attention swap": attention_swap,
    "attention swap, nothing kept": functools.partial(attention_swap, margin_bytes=0),
    "attention swap, 0.75 GiB kept": functools.partial(attention_swap, margin_bytes=3 << 28),
    "attention swap, 1.5 GiB kept": functools.partial(attention_swap, margin_bytes=3 << 29),
    "save_on_cpu": save_on_cpu,
}


def measure(mode, model, plan, batch, device, steps):
    """Warm up, then return the times and peaks of some steps and the bytes copied in each."""
    with MODES[mode](model, plan) as handle:
        timed(model, batch, device)
        before = handle.stats() if handle else None
        rows = [timed(model, batch, device) for _ in range(steps)]
        after = handle.stats() if handle else None
        copied = {}
        if handle:
            copied = {
                "out_bytes": (after.copied_out_bytes - before.copied_out_bytes) // steps,
                "in_bytes": (after.copied_in_bytes - before.copied_in_bytes) // steps,
            }
    gc.collect()
    return rows, copied


def copy_rates(mode, model, plan, batch):
    """Return {direction: {bytes_per_second, seconds}} of the pinned copies of one step, as the profiler saw them."""
    with MODES[mode](model, plan) as handle:
        train_step(model, batch)
        before = handle.stats() if handle else None
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            train_step(model, batch)
            torch.cuda.synchronize()
        after = handle.stats() if handle else None
    seconds = {"DtoH": 0.0, "HtoD": 0.0}
    for event in seen.key_averages():
        for way in seconds:
            if f"Memcpy {way}" in event.key and "Pinned" in event.key:
                seconds[way] += event.self_device_time_total / 1e6
    rates = {way: {"seconds": s} for way, s in seconds.items()}
    if handle:
        rates["DtoH"]["bytes"] = after.copied_out_bytes - before.copied_out_bytes
        rates["HtoD"]["bytes"] = after.copied_in_bytes - before.copied_in_bytes
        for rate in rates.values():
            rate["gigabytes_per_second"] = rate["bytes"] / rate["seconds"] / 1e9
    return rates


def compare_gradients(stepper, model, plan, batch):
    """Return how many gradients differ from the baseline: the baseline's own, run again, and each mode's."""
    reference, loss = stepper.checksums(model, batch)
    found = {}
    modes = ("attention swap", "attention swap, nothing kept", "save_on_cpu")
    for name, mode in [("nothing, again", nothing), *((m, MODES[m]) for m in modes)]:
        with mode(model, plan):
            train_step(model, batch)
            sums, other_loss = stepper.checksums(model, batch)
        different = [n for n in reference if sums[n][0] != reference[n][0]]
        worst = max((abs(sums[n][1] / reference[n][1] - 1) for n in different if reference[n][1]), default=0.0)
        found[name] = {"different": len(different), "of": len(reference), "worst_norm_ratio": worst,
                       "loss_equal": loss == other_loss}  # fmt: skip
    return found


def main():
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--modes", default="attention swap", help="separated by semicolons")
    parser.add_argument("--slow-modes", default="save_on_cpu")
    args = parser.parse_args()
    device, model, batch, stepper = prepare(args)
    plan = memopt.plan(memopt.analyze(model, batch, name=args.preset), activation_swap="attention")
    gradients = compare_gradients(stepper, model, plan, batch)
    print(json.dumps(gradients), flush=True)
    if args.gradients_only:
        return
    results = {"nothing": []} | {
        mode: [] for mode in [*args.modes.split(";"), *filter(None, args.slow_modes.split(";"))]
    }
    copied = {}
    for pair in range(args.pairs):
        for mode in results:
            if pair > 2 and mode in args.slow_modes.split(";"):
                continue
            rows, moved = measure(mode, model, plan, batch, device, steps=2)
            results[mode].append(rows)
            copied[mode] = moved
        print(pair, {m: [round(r[0], 3) for r in rows[-1]] for m, rows in results.items() if rows}, flush=True)
    report = summary(args, model, plan, results, copied, gradients, device)
    if device == "cuda":
        report["copies"] = {mode: copy_rates(mode, model, plan, batch) for mode in results if mode != "nothing"}
    print(json.dumps(report, indent=1))
    write(report, args.output)


def summary(args, model, plan, results, copied, gradients, device):
    base = results["nothing"]
    rows = {}
    for mode, measured in results.items():
        seconds = [row.seconds for rows in measured for row in rows]
        pairs = [pair for rows, base_rows in zip(measured, base) for pair in zip(rows, base_rows)]
        ratios = [row.seconds / base_row.seconds for row, base_row in pairs]
        rows[mode] = {
            "peak_bytes": max(row.peak_bytes for rows in measured for row in rows),
            "step_seconds": {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)},
            "ratio_to_nothing": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
            **copied[mode],
        }
    predicted = account(plan)
    pool = engine_of(torch.device(device, 0) if device == "cuda" else torch.device("cpu")).pool
    return {
        "model": args.preset, "num_layers": model.config.num_hidden_layers, "batch_size": args.batch_size,
        "seq_length": args.seq_length, "dtype": "bfloat16", "attn_implementation": "sdpa", "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "predicted": {"swap_bytes": predicted.swap_bytes, "freed_bytes": predicted.freed_bytes},
        "host_pool_bytes": pool.held_bytes, "modes": rows, "gradients": gradients,
    }  # fmt: skip


if __name__ == "__main__":
    main()
