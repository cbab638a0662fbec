"""memopt beside every peer on one GPU: the same model, weights, inputs and steps in one process.

Modes take turns, the baseline's step beside each: peaks, step time, bytes and rates of the copies, how long the compute
stream waited for them, pinned host bytes, what the host thread that launches has to do, and gradients. A mode that
runs out of memory is a row. TRL is compared where it is installed.

    python benchmarks/gpu_compare.py qwen3-30b-a3b --seq-length 4096 --pairs 10 --output docs/benchmarks/x.json
"""

import gc
import os
import threading
import time

import torch
from gpu_compare_report import print_table, summary
from gpu_peers import modes
from gpu_steps import arguments, prepare, train_step, write
from gpu_watch import copies, timed_in_full, waited_seconds

import memopt
from memopt.runtime.engine import engine_of
from memopt.runtime.host_memory import available_host_bytes

HOST_RESERVE_BYTES = 6 << 30
"""With less left, the host ends the process without a message; so it ends itself before, with one."""


class Comparison:
    """What was measured of each mode, kept until the report, which is written early when host memory runs out."""

    def __init__(self, args, model, batch, stepper, graph):
        self.args, self.model, self.batch, self.stepper, self.graph = args, model, batch, stepper, graph
        self.rows, self.steps = {}, {}
        self.modes = {name: mode for name, mode in modes(args.preset).items() if self.wanted(name)}
        self.mode, self.again = "nothing", None

    def wanted(self, name):
        return name == "nothing" or not self.args.modes or any(part in name for part in self.args.modes.split(";"))

    def run(self):
        """Measure every mode in turn, so that a slow spell of the machine hits all of them."""
        for pair in range(self.args.pairs):
            for name in list(self.modes):
                if "failed" in self.rows.get(name, {}) or (self.is_slow(name) and pair >= self.args.slow_pairs):
                    continue
                self.mode = name
                self.attempt(name, first=pair == 0)
            print(pair, {name: round(steps[-1].seconds, 3) for name, steps in self.steps.items()}, flush=True)

    def is_slow(self, name):
        steps = self.steps.get(name)
        return bool(steps) and steps[-1].seconds > 1.6 * self.steps["nothing"][-1].seconds

    def attempt(self, name, first):
        try:
            self.measure(name, first)
        except Exception as error:  # a peer that does not run is a row as well
            self.rows[name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
            for parameter in self.model.parameters():
                parameter.grad = None
        gc.collect()
        torch._C._host_emptyCache()
        torch.cuda.empty_cache()  # else what one mode's sizes left in the allocator counts as another's reserved bytes

    def measure(self, name, first):
        with self.modes[name](self.model, self.graph) as handle:
            for _ in range(self.args.warm_up):
                train_step(self.model, self.batch)
            steps = [timed_in_full(self.model, self.batch) for _ in range(self.args.steps)]
            self.steps.setdefault(name, []).extend(steps)
            if first:
                row = self.rows[name] = {"pinned_bytes": pinned_bytes()}
                row["copies"] = copies(self.model, self.batch)
                row["waited_seconds"] = waited_seconds(self.model, self.batch)
                row["sums"] = self.stepper.checksums(self.model, self.batch)
                if name == "nothing":
                    self.again = self.stepper.checksums(self.model, self.batch)
                if handle:
                    row["stats"] = held_by_engine()

    def watch_host(self):
        """End with what is known when a mode takes the last of the host's memory."""
        while True:
            time.sleep(0.1)
            if available_host_bytes() < HOST_RESERVE_BYTES:
                self.rows[self.mode] = {"failed": "host memory ran out"}
                self.report()
                os._exit(0)

    def report(self):
        report = summary(self)
        print_table(report)
        write(report, self.args.output)


def held_by_engine():
    """Return the host bytes of memopt's pool, which keeps them for the next mode too, and the most in use."""
    pool = engine_of(torch.device("cuda", 0)).pool.stats()
    return {"pool_held_bytes": pool.held_bytes, "pool_peak_bytes": pool.peak_bytes}


def pinned_bytes():
    """Return what torch has pinned for tensors, in blocks of powers of two."""
    return torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) if torch.cuda.is_available() else 0


def main():
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--slow-pairs", type=int, default=2, help="of modes that take 1.6 times as long as nothing")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--modes", default="", help="parts of names, separated by semicolons; all modes without")
    args = parser.parse_args()
    _, model, batch, stepper = prepare(args)
    graph = memopt.analyze(model, batch, name=args.preset)
    gc.freeze()  # the collector need not look at the model again and again: a full collection takes a third of a second
    comparison = Comparison(args, model, batch, stepper, graph)
    threading.Thread(target=comparison.watch_host, daemon=True).start()
    comparison.run()
    comparison.report()


if __name__ == "__main__":
    main()
