"""Facts about a model and decisions on them: frozen values, no torch. Printed, saved, or built by hand in a test."""

from memopt.ir.accounting import PlanAccount, SavedBytes, TargetAccount, TensorLine, account, keep_reason, saved_bytes
from memopt.ir.containers import Container, layer_containers, unwrap
from memopt.ir.graph import (
    FunctionCall,
    Kind,
    KvSharing,
    ModelFacts,
    ModuleCall,
    ModuleGraph,
    ModuleNode,
    SavedTensor,
    TraceInput,
)
from memopt.ir.op_policy import OP_POLICIES, Family, OpPolicy
from memopt.ir.plan import Action, Decision, Plan, RegionKey
from memopt.ir.policy import MIN_SWAP_TENSOR_BYTES, POLICIES, CheckpointPolicy, Keep, attention_keep_reason
from memopt.ir.queries import outermost
from memopt.ir.serialize import PLAN_SCHEMA_VERSION, load_plan, plan_from_json, plan_to_json, save_plan
from memopt.ir.submodules import layer_parts

__all__ = [
    "MIN_SWAP_TENSOR_BYTES",
    "OP_POLICIES",
    "PLAN_SCHEMA_VERSION",
    "POLICIES",
    "Action",
    "CheckpointPolicy",
    "Container",
    "Decision",
    "Family",
    "FunctionCall",
    "Keep",
    "Kind",
    "KvSharing",
    "ModelFacts",
    "ModuleCall",
    "ModuleGraph",
    "ModuleNode",
    "OpPolicy",
    "Plan",
    "PlanAccount",
    "RegionKey",
    "SavedBytes",
    "SavedTensor",
    "TargetAccount",
    "TensorLine",
    "TraceInput",
    "account",
    "attention_keep_reason",
    "keep_reason",
    "layer_containers",
    "layer_parts",
    "load_plan",
    "outermost",
    "plan_from_json",
    "plan_to_json",
    "save_plan",
    "saved_bytes",
    "unwrap",
]
