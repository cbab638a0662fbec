"""What is active while a rewritten model trains: regions, groups, the swap engine and its devices."""

from memopt.runtime.apply import Rewriting, apply_plan, finish_copies, undo
from memopt.runtime.backends import Backend, CpuBackend
from memopt.runtime.contract import preserved
from memopt.runtime.counters import Stats
from memopt.runtime.policy import attention_swap_policy

__all__ = [
    "Backend",
    "CpuBackend",
    "Rewriting",
    "Stats",
    "apply_plan",
    "attention_swap_policy",
    "finish_copies",
    "preserved",
    "undo",
]
