"""What the benchmarks on a GPU share: a model from a preset, a step that fits, its time and its peak."""

import argparse
import contextlib
import json
import time
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

PARADIGM = {
    "activation_offload": {"modules": ["core_attn", "attn_proj", "expert_fc1"]},
    "recompute": {"modules": ["layernorm", "moe_act"]},
}
DENSE_PARADIGM = {
    "activation_offload": {"modules": ["core_attn", "attn_proj"]},
    "recompute": {"modules": ["layernorm", "mlp_act"]},
}


def paradigm_of(preset):
    """Return the published combination of offload and recompute, for experts or for one MLP a layer."""
    return PARADIGM if "a3b" in preset or "moe" in preset else DENSE_PARADIGM


def config_of(preset, num_layers):
    facts = json.loads((resources.files("memopt.presets") / f"{preset}.json").read_text())
    facts |= {"num_hidden_layers": num_layers} if num_layers else {}
    return AutoConfig.for_model(**facts)


def build(preset, num_layers, device):
    config = config_of(preset, num_layers)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()


def arguments(description):
    """Return a parser of what every benchmark takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--num-layers", type=int)
    parser.add_argument(
        "--gradients-only", action="store_true", help="deterministic kernels where there are any; no times"
    )
    parser.add_argument("--output", type=Path)
    return parser


def prepare(args):
    """Return the device, the model and its batch, with the kernels that are asked for, and what steps in backward."""
    torch.use_deterministic_algorithms(args.gradients_only)  # with warn_only flash would stay as it is
    torch.backends.cuda.enable_cudnn_sdp(not args.gradients_only)  # flash has a deterministic backward, cuDNN has none
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(args.preset, args.num_layers, device)
    ids = torch.randint(0, model.config.vocab_size, (args.batch_size, args.seq_length), device=device)
    return device, model, {"input_ids": ids, "labels": ids, "use_cache": False}, StepInBackward(model)


def write(report, output):
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=1) + "\n")


class StepInBackward:
    """SGD with a learning rate of 0 as each gradient is ready; notes checksums when asked to."""

    def __init__(self, model):
        self.sums = None
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._step(name, p))

    def _step(self, name, parameter):
        grad = parameter.grad
        if self.sums is not None:
            bits = grad.view(torch.int16) if grad.dtype is torch.bfloat16 else grad.view(torch.int32)
            self.sums[name] = (bits.sum(dtype=torch.int64), grad.float().norm())
        with torch.no_grad():
            parameter.add_(grad, alpha=-0.0)
        parameter.grad = None

    def checksums(self, model, batch):
        """Return {name: (sum of bits, norm)} and the loss of one step."""
        self.sums = {}
        loss = train_step(model, batch)
        sums, self.sums = {n: (int(b), float(m)) for n, (b, m) in self.sums.items()}, None
        return sums, float(loss)


class Step(NamedTuple):
    """What one step took."""

    seconds: float
    peak_bytes: int
    forward_cpu_seconds: float
    """Of the thread that launches the forward: what it has to do, and waiting for a place in the GPU's queue."""


def train_step(model, batch):
    loss = model(**batch).loss
    loss.backward()
    return loss.detach()


@contextlib.contextmanager
def nothing(model, plan):
    yield None


def timed(model, batch, device):
    """Take one step and measure it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began, cpu_began = time.perf_counter(), time.thread_time()
    loss = model(**batch).loss
    forward_cpu_seconds = time.thread_time() - cpu_began
    loss.backward()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return Step(seconds, torch.cuda.max_memory_allocated() if device == "cuda" else 0, forward_cpu_seconds)
