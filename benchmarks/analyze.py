"""Time the whole memopt-analyze command on the full Qwen3-30B-A3B, and measure its largest resident size."""

import resource
import subprocess
import sys
import time

COMMAND = [
    "qwen3-30b-a3b",
    "--swap",
    "attention",
    "--seq-length",
    "1024",
    "--dtype",
    "bfloat16",
    "--no-predict",
    "--format",
    "json",
]
NUM_RUNS = 3


def main() -> None:
    script = "from memopt.cli.analyze import main; main()"
    for number in range(NUM_RUNS):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", script, *COMMAND], check=True, stdout=subprocess.DEVNULL)
        print(f"run {number + 1}: {time.perf_counter() - began:.2f} s")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(f"largest resident size: {peak / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
