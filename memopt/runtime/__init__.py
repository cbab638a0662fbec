"""What is active while a rewritten model trains: regions, groups, the swap engine and its devices."""

from memopt.runtime.apply import Rewriting, apply_plan, finish_copies, undo
from memopt.runtime.backends import Backend, CpuBackend
from memopt.runtime.contract import check_is_module, check_rewritable, preserved
from memopt.runtime.counters import Stats
from memopt.runtime.lazy import PendingRewriting, rewrite_on_first_forward, take_off
from memopt.runtime.policy import attention_swap_policy
from memopt.runtime.wrapper import SwapManager, swap_wrapper

__all__ = [
    "Backend",
    "CpuBackend",
    "PendingRewriting",
    "Rewriting",
    "Stats",
    "SwapManager",
    "apply_plan",
    "attention_swap_policy",
    "check_is_module",
    "check_rewritable",
    "finish_copies",
    "preserved",
    "rewrite_on_first_forward",
    "swap_wrapper",
    "take_off",
    "undo",
]
