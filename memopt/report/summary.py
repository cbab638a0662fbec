"""A plan as plain values for JSON. The keys are a contract: add, never rename."""

from dataclasses import asdict
from typing import Any

from memopt.ir import Plan, TargetAccount, TensorLine, account, saved_bytes
from memopt.report.notes import notes_of
from memopt.report.rows import SAME_STORAGE, deciding_lines

SCHEMA_VERSION = 1


def plan_summary(plan: Plan) -> dict[str, Any]:
    """Return what the report says as one JSON-ready dict."""
    totals = account(plan)
    model = plan.graph.model
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
            "freed_bytes": totals.freed_bytes,
            "num_tensors": totals.num_tensors,
        },
        "prefetch_chain": list(plan.prefetch_chain),
        "saved": asdict(saved_bytes(plan.graph.saved)),
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
