"""Where the time of a checkpointed step goes: launches by the host, work of the GPU, pauses of Python's collector.

python benchmarks/profile_checkpoint.py qwen3-30b-a3b --seq-length 4096
"""

import argparse
import gc
import time

import torch
from gpu_activation_checkpoint import MODES
from gpu_steps import StepInBackward, build

import memopt


class Pauses:
    """Add up how long the garbage collector stops the program, and how often in its oldest generation."""

    def __init__(self):
        self.seconds, self.full = 0.0, 0
        gc.callbacks.append(self)

    def __call__(self, phase, info):
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._began
            self.full += info["generation"] == 2

    def taken(self):
        """Return milliseconds and full collections since the last call."""
        result = round(1e3 * self.seconds, 1), self.full
        self.seconds, self.full = 0.0, 0
        return result


def step(model, batch):
    """Return milliseconds until forward is launched, until backward is, and until all is done."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    loss = model(**batch).loss
    middle = time.perf_counter()
    loss.backward()
    launched = time.perf_counter()
    torch.cuda.synchronize()
    return [round(1e3 * (t - began)) for t in (middle, launched, time.perf_counter())]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--seq-length", type=int, default=4096)
    args = parser.parse_args()
    model = build(args.preset, args.num_layers, "cuda")
    StepInBackward(model)
    ids = torch.randint(0, model.config.vocab_size, (1, args.seq_length), device="cuda")
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    graph = memopt.analyze(model, batch, name=args.preset)
    pauses = Pauses()
    for frozen in (False, True):
        if frozen:
            gc.collect()
            gc.freeze()
        for mode, entered in MODES.items():
            with entered(model, graph):
                for _ in range(3):
                    step(model, batch)
                pauses.taken()
                before = torch.cuda.memory_stats()
                rows = [(*step(model, batch), *pauses.taken()) for _ in range(6)]
                after = torch.cuda.memory_stats()
            mallocs = {k: after[k] - before[k] for k in ("num_device_alloc", "num_device_free", "num_alloc_retries")}
            print(
                f"{mode:15} frozen={frozen} forward, backward launched, done, gc ms, full:", rows, mallocs, flush=True
            )


if __name__ == "__main__":
    main()
