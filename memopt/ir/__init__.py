"""Facts about a model and decisions on them: frozen values, no torch. Printed, saved, or built by hand in a test."""

from memopt.ir.accounting import account, keep_reason
from memopt.ir.accounts import PlanAccount, SavedBytes, TargetAccount, TensorLine, saved_bytes
from memopt.ir.containers import Container, layer_containers, unwrap
from memopt.ir.device import DEVICES, DeviceProfile, find_device, save_device
from memopt.ir.graph import (
    FunctionCall,
    Kind,
    KvSharing,
    ModelFacts,
    ModuleCall,
    ModuleGraph,
    ModuleNode,
    PartCall,
    SavedTensor,
    TraceInput,
)
from memopt.ir.layers import outermost_of, saves_activations, why_not_kept, why_not_native
from memopt.ir.memory import OPTIMIZERS, Memory, Moment, Phase, StepMemory, Use
from memopt.ir.offload import DEFAULT_MIN_ELEMENTS, Group, Offload
from memopt.ir.offload_accounts import GroupAccount, LayerShare, OffloadAccount, RecipeAccount
from memopt.ir.offload_fates import Fates
from memopt.ir.offload_request import (
    RECOMPUTABLE,
    check_count,
    check_fraction,
    check_inflight,
    check_margin,
    check_together,
    offload_names,
    recompute_names,
)
from memopt.ir.offload_rules import group_name, kept_groups
from memopt.ir.offload_search import Found, find_groups
from memopt.ir.op_policy import OP_POLICIES, Family, OpPolicy
from memopt.ir.plan import COMPILE, OFFLOAD, RECIPE, ROUTES, Action, Decision, Plan, RegionKey
from memopt.ir.policy import MIN_SWAP_TENSOR_BYTES, POLICIES, CheckpointPolicy, Keep, attention_keep_reason
from memopt.ir.queries import outermost
from memopt.ir.recompute_account import KeptResults, RecomputeAccount
from memopt.ir.recompute_modules import recomputable
from memopt.ir.region_groups import Seen
from memopt.ir.replay import MAX_TAIL_TENSOR_BYTES
from memopt.ir.serialize import PLAN_SCHEMA_VERSION, load_plan, plan_from_json, plan_to_json, save_plan
from memopt.ir.submodules import layer_parts

__all__ = [
    "COMPILE",
    "DEFAULT_MIN_ELEMENTS",
    "DEVICES",
    "MAX_TAIL_TENSOR_BYTES",
    "MIN_SWAP_TENSOR_BYTES",
    "OFFLOAD",
    "OPTIMIZERS",
    "OP_POLICIES",
    "PLAN_SCHEMA_VERSION",
    "POLICIES",
    "RECIPE",
    "RECOMPUTABLE",
    "ROUTES",
    "Action",
    "CheckpointPolicy",
    "Container",
    "Decision",
    "DeviceProfile",
    "Family",
    "Fates",
    "Found",
    "FunctionCall",
    "Group",
    "GroupAccount",
    "Keep",
    "KeptResults",
    "Kind",
    "KvSharing",
    "LayerShare",
    "Memory",
    "ModelFacts",
    "ModuleCall",
    "ModuleGraph",
    "ModuleNode",
    "Moment",
    "Offload",
    "OffloadAccount",
    "OpPolicy",
    "PartCall",
    "Phase",
    "Plan",
    "PlanAccount",
    "RecipeAccount",
    "RecomputeAccount",
    "RegionKey",
    "SavedBytes",
    "SavedTensor",
    "Seen",
    "StepMemory",
    "TargetAccount",
    "TensorLine",
    "TraceInput",
    "Use",
    "account",
    "attention_keep_reason",
    "check_count",
    "check_fraction",
    "check_inflight",
    "check_margin",
    "check_together",
    "find_device",
    "find_groups",
    "group_name",
    "keep_reason",
    "kept_groups",
    "layer_containers",
    "layer_parts",
    "load_plan",
    "offload_names",
    "outermost",
    "outermost_of",
    "plan_from_json",
    "plan_to_json",
    "recomputable",
    "recompute_names",
    "save_device",
    "save_plan",
    "saved_bytes",
    "saves_activations",
    "unwrap",
    "why_not_kept",
    "why_not_native",
]
