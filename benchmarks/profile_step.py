"""Where the host spends a step: torch's profiler on the model as it is and with attention swap.

python benchmarks/profile_step.py qwen3-30b-a3b --num-layers 12 --seq-length 1024
"""

import argparse
import time

import torch
from gpu_steps import StepInBackward, build
from torch.profiler import ProfilerActivity, profile

import memopt
from memopt.runtime import engine as engine_module
from memopt.runtime import forward as forward_module
from memopt.runtime import group as group_module
from memopt.runtime import handles as handles_module


class Timers:
    """Add up the host time of a few of the engine's functions, with little cost of their own."""

    def __init__(self):
        self.seconds, self.calls = {}, {}

    def wrap(self, owner, name):
        inner = getattr(owner, name)

        def timed(*args, **kwargs):
            began = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0) + time.perf_counter() - began
                self.calls[name] = self.calls.get(name, 0) + 1

        setattr(owner, name, timed)


def step(model, batch):
    torch.cuda.synchronize()
    began = time.perf_counter()
    loss = model(**batch).loss
    middle = time.perf_counter()
    loss.backward()
    launched = time.perf_counter()
    torch.cuda.synchronize()
    return [round(1e3 * (t - began), 1) for t in (middle, launched, time.perf_counter())]


def report(name, model, batch):
    for _ in range(3):
        step(model, batch)
    print(name, "ms until forward launched, backward launched, all done:", [step(model, batch) for _ in range(5)])
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(2):
            step(model, batch)
    print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=22, max_name_column_width=50), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--seq-length", type=int, default=1024)
    args = parser.parse_args()
    model = build(args.preset, args.num_layers, "cuda")
    StepInBackward(model)
    ids = torch.randint(0, model.config.vocab_size, (1, args.seq_length), device="cuda")
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    report("nothing", model, batch)
    memopt.apply(model, {"activation_swap": "attention"}, batch)
    report("attention swap", model, batch)
    timers = Timers()
    for owner, name in (
        (group_module.Group, "pack"), (group_module.Group, "close"), (group_module.Group, "reach"),
        (group_module.Group, "_swapped"), (engine_module.Engine, "copy_out"), (engine_module.Engine, "load"),
        (engine_module.Engine, "tensor_of"), (engine_module.Engine, "collect"),
        (handles_module.Swapped, "unpack"), (forward_module, "_saves"), (forward_module, "signature"),
        (forward_module, "link"),
    ):  # fmt: skip
        timers.wrap(owner, name)
    times = [step(model, batch) for _ in range(5)]
    print("with timers", times)
    for name, seconds in timers.seconds.items():
        layers = 5 * args.num_layers
        print(f"{name:12} {1e6 * seconds / layers:8.1f} us a layer, {timers.calls[name] / layers:.1f} calls")


if __name__ == "__main__":
    main()
