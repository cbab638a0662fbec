"""Fine-grained offload on one GPU: each region alone and the combinations, beside the baseline, in one process.

Of each mode: what is allocated when the forward has ended and its copies are done, against what the plan promises; the
peak of the step; its time, beside the baseline's step before it.

    python benchmarks/gpu_fine_grained.py qwen3-30b-a3b --seq-length 4096 --output docs/benchmarks/x.json
"""

import contextlib
import gc
import json
import statistics

import torch
from gpu_steps import PARADIGM, arguments, prepare, timed, train_step, write

import memopt
from memopt.ir import account
from memopt.ir.regions import FUSED_GROUP_MLP
from memopt.runtime import finish_copies

WARM_UP = 3


def modes(regions):
    """Return the configurations by name: each region alone, with what it needs, and the combinations."""
    rows = {}
    for name in regions:
        needed = ["core_attn", "attn_proj"] if name == "attn_proj" else [name]
        rows[" + ".join(needed)] = {"activation_offload": {"modules": needed}}
    rows["recompute layernorm"] = {"recompute": {"modules": ["layernorm"]}}
    rows["recompute moe_act"] = {"recompute": {"modules": ["moe_act"]}}
    rows["paradigm"] = PARADIGM
    rows["paradigm, half of the groups"] = PARADIGM | {
        "activation_offload": PARADIGM["activation_offload"] | {"fraction": 0.5}
    }
    rows["paradigm, moe_act and moe_fc2 too"] = PARADIGM | {
        "activation_offload": {"modules": [*PARADIGM["activation_offload"]["modules"], "moe_act", "moe_fc2"]}
    }
    return rows


@contextlib.contextmanager
def applied(model, plan):
    handle = memopt.apply(model, plan) if plan else None
    try:
        yield handle
    finally:
        if handle:
            handle.undo()


def allocated_after_forward(model, batch):
    """Return the bytes that the device holds between forward and backward, copies done."""
    loss = model(**batch).loss
    finish_copies(model)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    loss.backward()
    torch.cuda.synchronize()
    return held


def measure(model, plan, batch, steps, warm_up=WARM_UP):
    with applied(model, plan) as handle:
        for _ in range(warm_up):
            timed(model, batch, "cuda")
        held = allocated_after_forward(model, batch)
        before = handle.stats() if handle else None
        rows = [timed(model, batch, "cuda") for _ in range(steps)]
        after = handle.stats() if handle else None
    gc.collect()
    row = {"held_bytes": held, "peak_bytes": max(r.peak_bytes for r in rows), "seconds": min(r.seconds for r in rows)}
    row["median_seconds"] = statistics.median(r.seconds for r in rows)
    if handle:
        row["copied_bytes"] = (after.copied_out_bytes - before.copied_out_bytes) // steps
    return row


def rows_of(model, graph, batch, steps):
    """Yield (name, its row): the baseline first, and again before each mode, for its time."""
    base = measure(model, None, batch, steps)
    yield "nothing", base
    for name, config in modes(region_names(graph)).items():
        plan = memopt.plan(graph, **config)
        beside = measure(model, None, batch, steps, warm_up=1)
        row = measure(model, plan, batch, steps)
        totals = account(plan)
        row["predicted_copied_bytes"] = totals.swap_bytes
        row["predicted_freed_bytes"] = totals.net_freed_bytes
        row["freed_bytes"] = base["held_bytes"] - row["held_bytes"]
        row["peak_freed_bytes"] = base["peak_bytes"] - row["peak_bytes"]
        row["ratio"] = row["median_seconds"] / beside["median_seconds"]
        yield name, row


def region_names(graph):
    """Return the regions that the model has."""
    found = memopt.regions(graph)
    return [*found, *([FUSED_GROUP_MLP] if "expert_fc1" in found else [])]


def compare_gradients(stepper, model, graph, batch):
    """Return, per mode, how many gradients differ from the baseline's by a bit; the baseline's own, run again, first."""
    reference, loss = stepper.checksums(model, batch)
    found = {}
    for name, config in {"nothing, again": None, **modes(region_names(graph))}.items():
        with applied(model, memopt.plan(graph, **config) if config else None):
            train_step(model, batch)
            sums, other_loss = stepper.checksums(model, batch)
        different = sum(sums[name][0] != reference[name][0] for name in reference)
        found[name] = {"different": different, "of": len(reference), "loss_equal": loss == other_loss}
    return found


def main():
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    _, model, batch, stepper = prepare(args)
    graph = memopt.analyze(model, batch, name=args.preset)
    gc.freeze()  # the collector need not look at the model again and again: a full collection takes a third of a second
    if args.gradients_only:
        print(json.dumps(compare_gradients(stepper, model, graph, batch)))
        return
    report = {"model": args.preset, "seq_length": args.seq_length, "batch_size": args.batch_size, "modes": {}}
    report |= {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    for name, row in rows_of(model, graph, batch, args.steps):
        report["modes"][name] = row
        print(name, json.dumps(row), flush=True)
    write(report, args.output)


if __name__ == "__main__":
    main()
