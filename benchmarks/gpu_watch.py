"""What one step takes: time on host and device, copies, and how long computation waited for them."""

import contextlib
import json
import tempfile
import time
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from gpu_steps import train_step
from torch.profiler import ProfilerActivity, profile

from memopt.runtime.backends.accelerator import AcceleratorBackend


class FullStep(NamedTuple):
    """One step, timed."""

    seconds: float
    peak_bytes: int
    reserved_bytes: int
    forward_host_seconds: float
    """Until all of the forward was launched, with waiting for a place in the queue: little of it at short sequences."""
    backward_host_seconds: float


def timed_in_full(model, batch):
    """Take one step and measure it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    loss = model(**batch).loss
    middle = time.perf_counter()
    loss.backward()
    launched = time.perf_counter()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return FullStep(
        seconds,
        torch.cuda.max_memory_allocated(),
        torch.cuda.max_memory_reserved(),
        middle - began,
        launched - middle,
    )


def copies(model, batch):
    """Return {way: {bytes, seconds}} of the copies between host and device in one step, as the profiler sees them."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        train_step(model, batch)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        seen.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    ways = {"DtoH": {"bytes": 0, "seconds": 0.0}, "HtoD": {"bytes": 0, "seconds": 0.0}}
    for event in events:
        for way, row in ways.items():
            if f"Memcpy {way}" in event.get("name", ""):
                row["bytes"] += event["args"].get("bytes", 0)
                row["seconds"] += event["dur"] / 1e6
    return ways


def waited_seconds(model, batch):
    """Return how long the compute stream stood still in one step for what another stream was to finish.

    An event before and one behind each wait. What a peer copies on the compute stream itself is no wait.
    """
    compute, pairs = torch.cuda.current_stream(), []
    with contextlib.ExitStack() as patches:
        for owner, name in (
            (torch.cuda.Stream, "wait_event"), (torch.cuda.Stream, "wait_stream"),
            (AcceleratorBackend, "wait"), (AcceleratorBackend, "release_after"),
        ):  # fmt: skip
            patches.enter_context(mock.patch.object(owner, name, _timing(getattr(owner, name), compute, pairs)))
        train_step(model, batch)
        torch.cuda.synchronize()
    return sum(before.elapsed_time(after) for before, after in pairs) / 1e3


def _timing(wait, compute, pairs):
    def timed(self, *args, **kwargs):
        if isinstance(self, torch.cuda.Stream) and self != compute:
            return wait(self, *args, **kwargs)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(compute)
        waited = wait(self, *args, **kwargs)
        after.record(compute)
        pairs.append((before, after))
        return waited

    return timed
