"""Passes: Plan -> Plan, one a file. `registry.PASSES` names them all."""

from memopt.passes.activation_checkpoint import ActivationCheckpoint
from memopt.passes.attention_swap import AttentionSwap
from memopt.passes.base import Observer, Pass, Pipeline
from memopt.passes.fine_grained_offload import FineGrainedOffload
from memopt.passes.prefetch_chain import PrefetchChain
from memopt.passes.recompute_parts import RecomputeParts
from memopt.passes.registry import PASSES, make_pass, parse_passes

__all__ = [
    "PASSES",
    "ActivationCheckpoint",
    "AttentionSwap",
    "FineGrainedOffload",
    "Observer",
    "Pass",
    "Pipeline",
    "PrefetchChain",
    "RecomputeParts",
    "make_pass",
    "parse_passes",
]
