"""Compare the predicted memory of a class's training step with that of a real one."""

from contextlib import nullcontext

import transformers

import memopt
from memopt.errors import MemoptError
from tests.architectures.inputs import batch
from tests.architectures.routing import BalancedRouting
from tests.predict.steps import predicted, real_totals

CONFIGS = {"plain": None, "full": {"activation_checkpoint": "full"}}


def wrong_peaks(build, graph):
    """Return what differs between predicted and real peaks, empty if nothing does; raises what the steps raise."""
    assumes_balance = any("choose evenly" in note for note in graph.notes)
    found = []
    for name, config in CONFIGS.items():
        model = build()
        inputs = batch(model)
        try:
            plan = memopt.plan(graph, config) if config else None
        except MemoptError:  # the column of that mode says why
            continue
        foretold = max(predicted(model, inputs, plan, ends_at_once=True, num_forwards=2)[0].totals)
        if plan:
            memopt.apply(model, plan)
        transformers.set_seed(0)
        with BalancedRouting() if assumes_balance else nullcontext():
            peak = max(real_totals(model, inputs, ends_at_once=True))
        if foretold != peak:
            found.append(f"{name}: {foretold} B predicted, {peak} B real")
    return "; ".join(found)
