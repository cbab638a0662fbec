"""What memopt-apply trains: the model, its batches and its plan, from what the flags ask for."""

from collections.abc import Callable

import torch
from torch import nn

import memopt
from memopt.analyze import analyze
from memopt.cli.building import build_model, make_batches, pick_device
from memopt.cli.models import Source, adapt_live, attention_of, find_model, positions_of
from memopt.cli.proof import Trial
from memopt.cli.request import InputRequest, PlanRequest
from memopt.errors import PlanMismatchError
from memopt.ir import ModelFacts


def prepare(
    name: str,
    asked: PlanRequest,
    request: InputRequest,
    *,
    device: str,
    steps: int,
    num_layers: int | None,
    seed: int,
    say: Callable[[str], None],
) -> Trial:
    """Build the model, its batches and its plan; raises MemoptError."""
    target = pick_device(device)
    source = find_model(name, num_layers=num_layers)
    given = request.over(source.default, asked.plan.graph.input if asked.plan else None)
    say(f"Building {source.name}")
    model = _build(source, request, given, device=target, seed=seed)
    batches = make_batches(model, given, num=steps, seed=seed)
    say(f"Tracing {source.name}")
    with positions_of(source.config, given.seq_length):
        graph = analyze(model, batches[0], autocast=given.autocast or "none", name=source.name)
    if asked.plan:
        check_same_model(asked.plan.graph.model, graph.model)
    plan = asked.plan or memopt.plan(graph, passes=asked.passes)
    return Trial(model=model, plan=plan, batches=batches, input=graph.input, seed=seed, say=say)


def check_same_model(planned: ModelFacts, here: ModelFacts) -> None:
    """Raise a PlanMismatchError where a plan was made for a model of another class or size."""
    for_, real = ((facts.class_name, facts.num_parameters) for facts in (planned, here))
    if for_ != real:
        raise PlanMismatchError(
            f"plan for another model: it was made for {planned.name}, a {for_[0]} of {for_[1]:,} parameters; "
            f"here is {here.name}, a {real[0]} of {real[1]:,}"
        )


def _build(source: Source, request: InputRequest, given: InputRequest, *, device: torch.device, seed: int) -> nn.Module:
    """Return the model on its device; a factory's is changed only where a flag asks for it."""
    with attention_of(given.attn_implementation):
        if source.live is not None:
            adapt_live(source.live, dtype=request.dtype, attn_implementation=request.attn_implementation)
        return build_model(source, given, device=device, seed=seed)
