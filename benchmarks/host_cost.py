"""What the engine costs the host for each swapped layer, and where: forward and backward, launched without waiting.

python benchmarks/host_cost.py qwen3-30b-a3b --num-layers 12 --seq-length 1024
"""

import argparse
import cProfile
import pstats
import statistics
import time

import torch
from gpu_steps import StepInBackward, build

import memopt


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def launch_times(model, batch):
    """Return the host's seconds in forward and in backward of one step, and the whole step's."""
    synchronize()
    began = time.perf_counter()
    loss = model(**batch).loss
    middle = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    synchronize()
    return middle - began, end - middle, time.perf_counter() - began


def medians(model, batch, steps):
    for _ in range(3):
        launch_times(model, batch)
    return [statistics.median(column) * 1e3 for column in zip(*(launch_times(model, batch) for _ in range(steps)))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(args.preset, args.num_layers, device)
    StepInBackward(model)
    ids = torch.randint(0, model.config.vocab_size, (1, args.seq_length), device=device)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    plain = medians(model, batch, args.steps)
    memopt.apply(model, {"activation_swap": "attention"}, batch)
    swapped = medians(model, batch, args.steps)
    memopt.undo(model)
    again = medians(model, batch, args.steps)
    print("ms a step         forward   backward   whole")
    for name, row in (("nothing", plain), ("attention swap", swapped), ("nothing, again", again)):
        print(f"{name:15} {row[0]:10.2f} {row[1]:10.2f} {row[2]:7.2f}")
    layers = args.num_layers
    print(
        f"us a layer      {(swapped[0] - plain[0]) / layers * 1e3:10.0f} {(swapped[1] - plain[1]) / layers * 1e3:10.0f}"
    )
    if args.profile:
        memopt.apply(model, {"activation_swap": "attention"}, batch)
        launch_times(model, batch)
        profile = cProfile.Profile()
        profile.enable()
        with torch.autograd.set_multithreading_enabled(False):  # backward in this thread, where the profiler sees it
            for _ in range(5):
                launch_times(model, batch)
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(32)


if __name__ == "__main__":
    main()
