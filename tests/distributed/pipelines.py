"""Stages of a pipeline, each rewritten by its own plan, beside the same schedule without a rewriting."""

import copy
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import memopt
from memopt.ir import Action, account
from tests import zoo
from tests.runtime.engines import cpu_engine

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
REGIONS = "attn_norm,core_attn,attn_proj,mlp_norm,qkv_linear"
LENGTH, WIDTH, MICROBATCH = 12, 32, 2


class Stage(nn.Module):
    """Some layers of a decoder; the first stage embeds, the last has the head."""

    def __init__(self, model, layers, *, is_first, is_last):
        super().__init__()
        self.embed = model.model.embed_tokens if is_first else None
        self.layers = nn.ModuleList(model.model.layers[number] for number in layers)
        self.rotary = model.model.rotary_emb
        self.norm, self.head = (model.model.norm, model.lm_head) if is_last else (None, None)

    def forward(self, x):
        x = x if self.embed is None else self.embed(x)
        places = torch.arange(x.shape[1]).unsqueeze(0)
        tables = self.rotary(x, places)
        for layer in self.layers:
            x = layer(x, position_embeddings=tables, position_ids=places)
        return x if self.head is None else self.head(self.norm(x))


def stages_of(name, rank, world, per_rank, depth):
    """Return this rank's stages of a seeded model, by number."""
    count = world * per_rank
    model = zoo.ZOO[name](num_hidden_layers=count * depth)
    return {
        number: Stage(
            model, range(number * depth, (number + 1) * depth), is_first=number == 0, is_last=number == count - 1
        )
        for number in range(rank, count, world)
    }


def example(number):
    """Return what a stage is called with: token numbers, or hidden states that need a gradient."""
    if number == 0:
        return torch.randint(20, 128, (MICROBATCH, LENGTH))
    return torch.randn(MICROBATCH, LENGTH, WIDTH, requires_grad=True)


def result(number, count):
    """Return what a stage gives out: hidden states, or what the head makes of them."""
    return torch.randn(MICROBATCH, LENGTH, 128 if number == count - 1 else WIDTH, requires_grad=True)


def loss_of(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def run(schedule, stages, count, num_microbatches, seed):
    """Do one step and return its losses."""
    made = [
        # what goes in and out is given: torch would find out by one more forward, which would be counted
        PipelineStage(
            module, number, count, torch.device("cpu"), input_args=example(number), output_args=result(number, count)
        )
        for number, module in stages.items()
    ]
    kind = SCHEDULES[schedule]
    schedule = kind(made if kind is ScheduleInterleaved1F1B else made[0], num_microbatches, loss_fn=loss_of)
    ids = torch.randint(20, 128, (MICROBATCH * num_microbatches, LENGTH), generator=torch.Generator().manual_seed(seed))
    losses = []
    last = {"target": ids, "losses": losses} if count - 1 in stages else {}
    schedule.step(*([ids] if 0 in stages else []), **last)
    return losses


def pipeline(rank, world, name, schedule, config, delta_bytes):
    """Steps with more, fewer and more microbatches: losses, gradients, and what each stage copied."""
    per_rank = 2 if schedule == "interleaved" else 1
    count = world * per_rank
    plain = stages_of(name, rank, world, per_rank, depth=2)
    stages, handles = {}, {}
    for number, module in plain.items():
        # virtual stages of a rank are on it together: each keeps the rank's delta
        options = {"pp_size": world, "pp_rank": rank}
        plan = memopt.plan(memopt.analyze(module, example(number)), **config, **options)
        check_delta(plan, rank, delta_bytes)
        stages[number] = copy.deepcopy(module)
        handles[number] = memopt.apply(stages[number], plan)
    for seed, num_microbatches in enumerate((2, 4, 6, 2)):
        before = {number: handle.stats() for number, handle in handles.items()}
        for modules in (plain, stages):
            for module in modules.values():
                module.zero_grad()
        losses = [run(schedule, modules, count, num_microbatches, seed) for modules in (plain, stages)]
        assert len(losses[0]) == len(losses[1]) == (num_microbatches if count - 1 in stages else 0)
        assert all(map(torch.equal, *losses))
        for number, module in stages.items():
            compare(plain[number], module)
            after, totals = handles[number].stats(), account(handles[number].plan)
            assert after.copied_out_bytes - before[number].copied_out_bytes == num_microbatches * totals.swap_bytes
            assert after.copied_out_tensors - before[number].copied_out_tensors == num_microbatches * totals.num_tensors
            assert after.copied_in_bytes == after.copied_out_bytes > 0
            assert after.checkpointed_calls == after.replayed_calls
            assert bool(after.replayed_calls) == ("recompute" in config)


def check_delta(plan, rank, delta_bytes):
    """The first groups of rank r stay, until r times the delta is reached; rank 0 keeps none for it."""
    groups = [group for group in account(plan).offload.groups if group.moved_bytes or group.action is Action.KEEP]
    kept = list(itertools.takewhile(lambda group: group.why.startswith("pipeline"), groups))
    assert bool(kept) == bool(rank * delta_bytes)
    assert len(kept) == sum(group.why.startswith("pipeline") for group in groups)
    if kept:
        sizes = [sum(size for why, size in group.kept if why == "pipeline") for group in kept]
        assert sum(sizes) >= rank * delta_bytes > sum(sizes[:-1])


def compare(plain, module):
    grads = {name: p.grad for name, p in plain.named_parameters()}
    assert all(grad is not None for name, grad in grads.items() if "experts" not in name)
    for name, p in module.named_parameters():
        assert p.grad is grads[name] is None or torch.equal(p.grad, grads[name]), name


def enter(rank, world, port, works):
    """Run works under a poisoned, delayed engine each, in which nothing may be left."""
    from tests.distributed.workers import enter_group

    torch.set_num_threads(1)
    with enter_group("gloo", rank, world, port):
        for options in works:
            try:
                with cpu_engine(poison=True, delay_s=lambda: 0.001):
                    pipeline(rank, world, **options)
            except BaseException as error:
                error.add_note(f"rank {rank} with {options}")
                raise
            dist.barrier()
