"""What the host pays a layer for checkpointing, in microseconds: tiny tensors, so that Python is all there is.

python benchmarks/host_cost_checkpoint.py --num-layers 8
"""

import argparse
import statistics
import time

import torch
from gpu_activation_checkpoint import MODES, WARM_UP
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import memopt


def tiny(num_layers):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=num_layers, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, intermediate_size=16, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.set_experts_implementation("grouped_mm")
    return model.train()


def step(model, batch):
    """Return seconds of forward and backward."""
    began = time.perf_counter()
    loss = model(**batch).loss
    middle = time.perf_counter()
    loss.backward()
    return middle - began, time.perf_counter() - middle


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = tiny(args.num_layers)
    ids = torch.randint(0, 64, (1, 8))
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    graph = memopt.analyze(model, batch)
    seconds = {mode: [] for mode in MODES}
    for _ in range(args.rounds):
        for mode in MODES:
            with MODES[mode](model, graph):
                for _ in range(WARM_UP):
                    step(model, batch)
                seconds[mode].append(step(model, batch))
    for mode, rows in seconds.items():
        forward, backward = (1e6 * statistics.median(column) / args.num_layers for column in zip(*rows, strict=True))
        print(f"{mode:15} forward {forward:7.0f}  backward {backward:7.0f}  both {forward + backward:7.0f}")


if __name__ == "__main__":
    main()
