"""A plan as plain values for JSON. The keys are a contract: add, never rename."""

from dataclasses import asdict
from typing import Any

from memopt.ir import Memory, Plan, PlanAccount, RecomputeAccount, TargetAccount, TensorLine, account, saved_bytes
from memopt.report.memory import memory_values
from memopt.report.notes import notes_of
from memopt.report.offload import offload_values
from memopt.report.rows import SAME_STORAGE, deciding_lines

SCHEMA_VERSION = 1


def plan_summary(plan: Plan, memory: Memory | None = None) -> dict[str, Any]:
    """Return what the report says as one JSON-ready dict; with `memory` only if that was predicted."""
    totals = account(plan)
    model = plan.graph.model
    swapped = [target.freed_bytes for target in totals.targets if target.recompute is None]
    recompute = {"recompute": _recompute_sums(totals)} if len(swapped) < len(totals.targets) else {}
    return {
        "schema_version": SCHEMA_VERSION,
        "model": {
            "name": model.name,
            "class": model.class_name,
            "num_parameters": model.num_parameters,
            "parameter_bytes": model.parameter_bytes,
        },
        "input": asdict(plan.graph.input),
        "targets": [_target(target) for target in totals.targets],
        "swap": {
            "covered_bytes": totals.covered_bytes,
            "bytes_per_step": totals.swap_bytes,
            "freed_bytes": sum(swapped) + (totals.offload.moved_freed_bytes if totals.offload else 0),
            "num_tensors": totals.num_tensors,
        },
        **recompute,
        **({"offload": offload_values(totals, totals.offload)} if totals.offload else {}),
        "prefetch_chain": list(plan.prefetch_chain),
        "saved": asdict(saved_bytes(plan.graph.saved)),
        **({"memory": memory_values(memory)} if memory else {}),
        "notes": list(notes_of(plan)),
    }


def _target(target: TargetAccount) -> dict[str, Any]:
    deciding = deciding_lines(target)
    return {
        "fqn": target.fqn,
        "class": target.class_name,
        "action": target.action.value,
        "covered_bytes": target.covered_bytes,
        "swap_bytes": target.swap_bytes,
        "freed_bytes": target.freed_bytes,
        "num_covered": target.num_covered,
        "kept": dict(target.kept),
        "tensors": [_tensor(line, counts=line.tensor.index in deciding) for line in target.lines],
        **({"recompute": _recompute(target.recompute, target.why)} if target.recompute else {}),
    }


def _recompute_sums(totals: PlanAccount) -> dict[str, Any]:
    """Return the sums over what is recomputed; a plan that recomputes nothing has none of them."""
    freed = sum(target.freed_bytes for target in totals.targets if target.recompute)
    return {
        "dropped_bytes": totals.dropped_bytes,
        "freed_bytes": freed,
        "input_bytes": totals.input_bytes,
        "result_bytes": totals.result_bytes,
        "added_bytes": totals.added_bytes,
        "net_freed_bytes": freed - totals.added_bytes,
        "replay_bytes": totals.replay_bytes,
        "flops": totals.flops,
        "repeated_flops": totals.repeated_flops,
    }


def _recompute(account: RecomputeAccount, why: str) -> dict[str, Any]:
    return {
        "route": account.route,
        "policy": account.policy,
        "why": why,
        "num_calls": account.num_calls,
        "input_bytes": account.input_bytes,
        "results": [
            {"family": kept.family.value, "num_calls": kept.num_calls, "bytes": kept.num_bytes}
            for kept in account.results
        ],
        "last_bytes": account.last_bytes,
        "replay_bytes": account.replay_bytes,
        "flops": account.flops,
        "repeated_flops": account.repeated_flops,
    }


def _tensor(line: TensorLine, *, counts: bool) -> dict[str, Any]:
    return {
        "role": line.tensor.role,
        "op": line.tensor.op,
        "shape": list(line.tensor.shape),
        "dtype": line.tensor.dtype,
        "storage_bytes": line.tensor.storage_bytes,
        "action": line.action.value,
        "reason": line.reason if counts else SAME_STORAGE,
    }
