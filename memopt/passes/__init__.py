"""Passes: Plan -> Plan, one a file. `registry.PASSES` names them all."""

from memopt.passes.activation_checkpoint import ActivationCheckpoint
from memopt.passes.attention_swap import AttentionSwap
from memopt.passes.base import Observer, Pass, Pipeline
from memopt.passes.prefetch_chain import PrefetchChain
from memopt.passes.registry import PASSES, make_pass, parse_passes

__all__ = [
    "PASSES",
    "ActivationCheckpoint",
    "AttentionSwap",
    "Observer",
    "Pass",
    "Pipeline",
    "PrefetchChain",
    "make_pass",
    "parse_passes",
]
