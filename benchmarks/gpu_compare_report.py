"""What gpu_compare prints and writes: every number as a ratio to the baseline of the same run where it is a time."""

import statistics

import torch
from rich.console import Console
from rich.table import Table

GIB = 2**30


def summary(comparison):
    """Return the report of a comparison as JSON values."""
    args, base = comparison.args, comparison.steps["nothing"]
    layers = comparison.model.config.num_hidden_layers
    rows = {}
    for name in comparison.modes:
        found = comparison.rows.get(name, {"failed": "not reached"})
        rows[name] = found if "failed" in found else _row(found, comparison.steps[name], base, layers)
    _compare_gradients(comparison, rows)
    return {
        "model": args.preset, "num_layers": layers, "batch_size": args.batch_size, "seq_length": args.seq_length,
        "torch": torch.__version__, "device": torch.cuda.get_device_name(), "pairs": args.pairs, "steps": args.steps,
        "deterministic": args.gradients_only, "modes": rows,
    }  # fmt: skip


def _row(found, steps, base, layers):
    pairs = list(zip(steps, base))
    forward = statistics.median(step.forward_host_seconds - other.forward_host_seconds for step, other in pairs)
    backward = statistics.median(step.backward_host_seconds - other.backward_host_seconds for step, other in pairs)
    return {
        "peak_bytes": max(step.peak_bytes for step in steps),
        "reserved_bytes": max(step.reserved_bytes for step in steps),
        "step_seconds": _spread([step.seconds for step in steps]),
        "ratio": _spread([step.seconds / other.seconds for step, other in pairs]),
        "host_us_per_layer": {"forward": forward / layers * 1e6, "backward": backward / layers * 1e6},
        "copies": found["copies"],
        "waited_seconds": found["waited_seconds"],
        "pinned_bytes": found["pinned_bytes"],
        **found.get("stats", {}),
    }


def _spread(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _compare_gradients(comparison, rows):
    """Note how many gradients differ in a bit from the baseline's, and the most that a norm differs."""
    reference, loss = comparison.rows["nothing"]["sums"]
    rows["nothing"]["gradients"] = _difference(reference, loss, *comparison.again)
    for name, row in rows.items():
        if name != "nothing" and "sums" in comparison.rows.get(name, {}):
            row["gradients"] = _difference(reference, loss, *comparison.rows[name]["sums"])


def _difference(reference, loss, sums, other_loss):
    different = [name for name in reference if sums[name][0] != reference[name][0]]
    norms = [abs(sums[name][1] / reference[name][1] - 1) for name in different if reference[name][1]]
    return {
        "different": len(different),
        "of": len(reference),
        "worst_norm_ratio": max(norms, default=0.0),
        "loss_equal": loss == other_loss,
    }


def print_table(report):
    """Print the rows, the memory freed and the time added beside the baseline."""
    title = f"{report['model']}, {report['batch_size']} x {report['seq_length']}, {report['device']}"
    headers = ("mode", "peak GiB", "freed", "reserved", "step s", "ratio (min to max)", "out / in GiB", "GB/s",
               "waited %", "host us a layer", "pinned GiB", "gradients differ")  # fmt: skip
    table = Table(*headers, title=title)
    base = report["modes"]["nothing"]
    for name, row in report["modes"].items():
        table.add_row(name, *(["-"] if "failed" in row else _cells(row, base)))
    console = Console(width=190)
    console.print(table)
    for name, row in report["modes"].items():
        if "failed" in row:
            console.print(f"{name}: {row['failed']}", markup=False)


def _cells(row, base):
    out, back = row["copies"]["DtoH"], row["copies"]["HtoD"]
    ratio, host, gradients = row["ratio"], row["host_us_per_layer"], row["gradients"]
    return (
        f"{row['peak_bytes'] / GIB:.2f}",
        f"{(base['peak_bytes'] - row['peak_bytes']) / GIB:.2f}",
        f"{row['reserved_bytes'] / GIB:.2f}",
        f"{row['step_seconds']['median']:.3f}",
        f"{ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})",
        f"{out['bytes'] / GIB:.2f} / {back['bytes'] / GIB:.2f}",
        " / ".join(f"{way['bytes'] / way['seconds'] / 1e9:.1f}" if way["seconds"] else "-" for way in (out, back)),
        f"{100 * row['waited_seconds'] / row['step_seconds']['median']:.1f}",
        f"{host['forward']:.0f} + {host['backward']:.0f}",
        f"{row['pinned_bytes'] / GIB:.2f}",
        f"{gradients['different']} of {gradients['of']}",
    )
