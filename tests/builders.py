"""Graphs and plans built by hand: no model, no torch, no clock."""

import math
from dataclasses import dataclass, field, replace

from memopt.ir import (
    DEVICES,
    Family,
    FunctionCall,
    Kind,
    KvSharing,
    Memory,
    ModelFacts,
    ModuleCall,
    ModuleGraph,
    ModuleNode,
    Moment,
    PartCall,
    Phase,
    Plan,
    SavedTensor,
    StepMemory,
    TraceInput,
    Use,
)
from memopt.passes import Pipeline, parse_passes

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int64": 8, "bool": 1}
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Save:
    """One saved tensor, as a test writes it down; a storage has a name, and is new where none is given."""

    owner: str
    shape: tuple[int, ...]
    node: str = "MmBackward0"
    field: str = "self"
    dtype: str = "float32"
    storage: str | None = None
    storage_bytes: int | None = None
    requires_grad: bool = True
    kind: Kind = Kind.ACTIVATION
    occurrence: int = 0


@dataclass(frozen=True, kw_only=True)
class Function:
    """One call of an expensive function, as a test writes it down; it saves what is saved from `first` before `end`."""

    owner: str
    first: int
    end: int
    outputs: dict[str, int]
    """Bytes by the name of the storage."""
    family: Family = Family.MM
    statistics: dict[str, int] = field(default_factory=dict)
    flops: int = 0
    keepable: bool = True


@dataclass(frozen=True, kw_only=True)
class Part:
    """One call of a part that is a method; it saves what is saved from `first` before `end`."""

    owner: str
    first: int
    end: int
    inputs: dict[str, int]
    """Bytes by the name of the storage."""
    outputs: dict[str, int]
    region: str = "moe_act"


@dataclass(frozen=True, kw_only=True)
class Build:
    """What else a graph says."""

    name: str = "hand-made"
    class_name: str = "Qwen3MoeForCausalLM"
    classes: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    bases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By a module's own name, as `classes` is."""
    frozen: tuple[str, ...] = ()
    """Modules whose one parameter needs no grad."""
    inputs: dict[str, dict[str, int]] = field(default_factory=dict)
    """By FQN: bytes by the name of the storage."""
    outputs: dict[str, dict[str, int]] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    flops: dict[str, int] = field(default_factory=dict)
    functions: tuple[Function, ...] = ()
    native_checkpointing: bool = False
    kv_sharing: KvSharing = KvSharing.NONE
    held: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    dtype: str = "float32"


def mib_save(owner, num_mib=1, **options):
    """Return a float32 save of so many MiB."""
    return Save(owner=owner, shape=(num_mib, MIB // 4), **options)


def graph_of(*saves, build=None):
    """Return a graph of the modules that the saves name, each called once, in the order of the saves."""
    build = build or Build()
    storages: dict[str, int] = {}
    saved = tuple(_tensor(index, save, storages) for index, save in enumerate(saves))
    nodes = tuple(_node(fqn, build) for fqn in _fqns(saves))
    calls = _calls([node.fqn for node in nodes], saved, build, storages)
    number = {call.fqn: call.index for call in calls}
    return ModuleGraph(
        model=ModelFacts(
            name=build.name,
            class_name=build.class_name,
            num_parameters=30_532_122_624,
            parameter_bytes=61_064_245_248,
            transformers_version="5.17.0",
            native_checkpointing=build.native_checkpointing,
            kv_sharing=build.kv_sharing,
        ),
        input=TraceInput(
            batch_size=1,
            seq_length=1024,
            dtype=build.dtype,
            autocast="none",
            attn_implementation="sdpa",
            target_device="cuda",
        ),
        modules=nodes,
        calls=calls,
        saved=tuple(replace(tensor, call=number[tensor.owner]) for tensor in saved),
        flows=(),
        held=frozenset(storages[name] for name in build.held),
        functions=tuple(_function(function, number[function.owner], storages) for function in build.functions),
        parts=tuple(_part(part, number[part.owner], storages) for part in build.parts),
        notes=build.notes,
    )


def plan_of(*saves, passes="attention-swap,prefetch-chain", build=None):
    """Return what the passes decide about a graph of those saves."""
    return Pipeline(parse_passes(passes)).run(Plan(graph=graph_of(*saves, build=build)))


def qwen_layers(num_layers, *, tokens=1024):
    """Return what decoder layers of Qwen3-30B-A3B save, in outline."""
    return [save for layer in range(num_layers) for save in qwen_layer(layer, tokens=tokens)]


def qwen_layer(layer, *, tokens):
    """Return what one decoder layer saves: a norm, the attention, and its expert block."""
    block, hidden = f"model.layers.{layer}", (tokens, 2048)
    attn, entry, out = f"{block}.self_attn", f"{block} normed", f"{block} attended"
    bf16 = {"dtype": "bfloat16"}
    heads = (1, 32, tokens, 128)
    sdpa = {"owner": attn, "node": "ScaledDotProductFlashAttentionBackward0", **bf16}
    weight = {"kind": Kind.PARAMETER, "field": "mat2", **bf16}
    return [
        Save(owner=f"{block}.input_layernorm", node="MulBackward0", shape=hidden, dtype="float32"),
        Save(owner=f"{attn}.q_proj", shape=hidden, storage=entry, **bf16),
        Save(owner=f"{attn}.q_proj", shape=(2048, 4096), **weight),
        Save(owner=f"{attn}.q_norm", node="PowBackward0", shape=(1, tokens, 32, 128), dtype="float32"),
        Save(owner=f"{attn}.q_norm", node="RsqrtBackward0", shape=(1, tokens, 32, 1), dtype="float32", field="result"),
        Save(owner=f"{attn}.k_proj", shape=hidden, storage=entry, **bf16),
        Save(owner=f"{attn}.k_proj", shape=(2048, 512), **weight),
        Save(owner=f"{attn}.v_proj", shape=hidden, storage=entry, **bf16),
        Save(owner=f"{attn}.v_proj", shape=(2048, 512), **weight),
        Save(owner=attn, node="MulBackward0", shape=(1, 1, tokens, 128), requires_grad=False, field="other", **bf16),
        Save(**sdpa, field="query", shape=heads),
        Save(**sdpa, field="key", shape=(1, 4, tokens, 128)),
        Save(**sdpa, field="value", shape=(1, 4, tokens, 128)),
        Save(**sdpa, field="output", shape=heads, storage=out),
        Save(**{**sdpa, "dtype": "float32"}, field="logsumexp", shape=(1, 32, tokens), requires_grad=False),
        Save(owner=f"{attn}.o_proj", shape=(tokens, 4096), storage=out, **bf16),
        Save(owner=f"{attn}.o_proj", shape=(4096, 2048), **weight),
        Save(owner=f"{block}.mlp.experts", node="GroupedMmBackward0", shape=(8 * tokens, 2048), **bf16),
    ]


def checkpointed_layers(num_layers, **options):
    """Return what decoder layers save, in outline, and what else a graph says of them."""
    saves = [save for layer in range(num_layers) for save in _checkpointed_layer(layer)]
    functions = [function for layer in range(num_layers) for function in _layer_functions(layer)]
    layers = [f"model.layers.{layer}" for layer in range(num_layers)]
    inputs = {fqn: {f"{fqn} entry": 4 * MIB, "rotary": MIB} for fqn in layers}
    inputs |= {f"{fqn}.self_attn": {f"{fqn} normed": 4 * MIB, "rotary": MIB} for fqn in layers}
    inputs |= {f"{fqn}.mlp": {f"{fqn} attended": 4 * MIB} for fqn in layers}
    flops = {"": 4_000_000_000 * num_layers + 10**9} | dict.fromkeys(layers, 4_000_000_000)
    flops |= {f"{fqn}.self_attn": 2_500_000_000 for fqn in layers} | {f"{fqn}.mlp": 1_500_000_000 for fqn in layers}
    facts = {
        "name": "hand-made",
        "class_name": "LlamaForCausalLM",
        "classes": {"layers": "ModuleList", "self_attn": "LlamaAttention", "mlp": "LlamaMLP"}
        | {str(layer): "LlamaDecoderLayer" for layer in range(num_layers)},
        "bases": {str(layer): ("GradientCheckpointingLayer",) for layer in range(num_layers)},
        "native_checkpointing": True,
        "inputs": inputs,
        "flops": flops,
        "functions": tuple(functions),
    }
    return saves, Build(**(facts | options))


def _checkpointed_layer(layer):
    """Return ten saves: of a norm, of attention, and of an MLP of two products."""
    block = f"model.layers.{layer}"
    attn, mlp = f"{block}.self_attn", f"{block}.mlp"
    attention = {"owner": attn, "node": "ScaledDotProductFlashAttentionBackward0"}
    weight = {"kind": Kind.PARAMETER, "field": "mat2"}
    return [
        mib_save(f"{block}.input_layernorm", 8, node="PowBackward0"),
        mib_save(f"{attn}.q_proj", 4, storage=f"{block} normed"),
        mib_save(f"{attn}.q_proj", 16, **weight),
        mib_save(attn, 1, node="MulBackward0", field="other", storage="rotary"),
        mib_save(num_mib=4, field="query", storage=f"{block} query", **attention),
        mib_save(num_mib=4, field="output", storage=f"{block} mixed", **attention),
        mib_save(f"{mlp}.up_proj", 4, storage=f"{block} attended"),
        mib_save(f"{mlp}.up_proj", 16, **weight),
        mib_save(mlp, 12, node="GeluBackward0", storage=f"{block} up"),
        mib_save(f"{mlp}.down_proj", 12, storage=f"{block} activated"),
    ]


def _layer_functions(layer):
    block, first = f"model.layers.{layer}", 10 * layer
    return [
        Function(
            owner=f"{block}.self_attn.q_proj",
            first=first + 1,
            end=first + 3,
            outputs={f"{block} projected": 4 * MIB},
            flops=500_000_000,
        ),
        Function(
            owner=f"{block}.self_attn",
            first=first + 4,
            end=first + 6,
            outputs={f"{block} mixed": 4 * MIB},
            family=Family.ATTENTION,
            statistics={f"{block} logsumexp": 1024},
            flops=2_000_000_000,
        ),
        Function(
            owner=f"{block}.mlp.up_proj",
            first=first + 6,
            end=first + 8,
            outputs={f"{block} up": 12 * MIB},
            flops=750_000_000,
        ),
        Function(
            owner=f"{block}.mlp.down_proj",
            first=first + 9,
            end=first + 10,
            outputs={f"{block} down": 4 * MIB},
            flops=750_000_000,
        ),
    ]


def moe_layers(num_layers, **options):
    """Return what decoder layers of a MoE model save, in outline, and what else a graph says of them."""
    saves = [save for layer in range(num_layers) for save in _moe_layer(layer)]
    layers = [f"model.layers.{layer}" for layer in range(num_layers)]
    inputs = {f"{fqn}.input_layernorm": {f"{fqn} entry": 4 * MIB} for fqn in layers}
    outputs = {f"{fqn}.input_layernorm": {f"{fqn} normed": 4 * MIB} for fqn in layers}
    parts = [
        Part(
            owner=f"{fqn}.mlp.experts",
            first=11 * layer + 8,
            end=11 * layer + 10,
            inputs={f"{fqn} gate_up": 16 * MIB},
            outputs={f"{fqn} activated": 8 * MIB},
        )
        for layer, fqn in enumerate(layers)
    ]
    facts = {
        "classes": {"layers": "ModuleList", "self_attn": "Attention", "experts": "Experts"},
        "inputs": inputs,
        "outputs": outputs,
        "parts": tuple(parts),
    }
    return saves, Build(**(facts | options))


def _moe_layer(layer):
    """Return eleven saves: of a norm, of attention, and of a block of experts whose activation is a method."""
    block = f"model.layers.{layer}"
    attn, experts = f"{block}.self_attn", f"{block}.mlp.experts"
    attention = {"owner": attn, "node": "ScaledDotProductFlashAttentionBackward0"}
    return [
        mib_save(f"{block}.input_layernorm", 8, node="PowBackward0"),
        mib_save(f"{attn}.q_proj", 4, storage=f"{block} normed"),
        mib_save(f"{attn}.k_proj", 4, storage=f"{block} normed"),
        mib_save(num_mib=4, field="query", **attention),
        mib_save(num_mib=4, field="output", storage=f"{block} mixed", **attention),
        mib_save(f"{attn}.o_proj", 4, storage=f"{block} mixed"),
        mib_save(f"{attn}.o_proj", 16, kind=Kind.PARAMETER, field="mat2"),
        mib_save(experts, 8, node="GroupedMmBackward0"),
        mib_save(experts, 16, node="SiluBackward0", storage=f"{block} gate_up"),
        mib_save(experts, 8, node="MulBackward0"),
        mib_save(experts, 8, node="GroupedMmBackward0", storage=f"{block} activated"),
    ]


LOSS = {"module": "", "op": "LogSoftmaxBackward0 aten._log_softmax_backward_data"}


def moment_of(at, *, phase=Phase.BACKWARD, module="model.layers.0.mlp", op="MmBackward0 aten.mm", **gib):
    """Return a moment with so many GiB for each use: parameters, optimizer, gradients, activations, workspace."""
    uses = tuple(round(gib.get(use.name.lower(), 0) * GIB) for use in Use)
    return Moment(total_bytes=sum(uses), uses=uses, phase=phase, module=module, op=op, at=at)


def step_of(*moments, forward_ms=100, backward_ms=200):
    """Return a step of those moments and no other."""
    return StepMemory(
        peak=max(moments, key=lambda moment: moment.total_bytes),
        moments=moments,
        most=tuple(max(moment.bytes_for(use) for moment in moments) for use in Use),
        num_operators=moments[-1].at + 1,
        compute_us=((Phase.FORWARD, 1000 * forward_ms), (Phase.BACKWARD, 1000 * backward_ms), (Phase.OPTIMIZER, 0)),
    )


def usual_step(*, activations=40, logits=8, state=10, **times):
    """Return a step that peaks in the loss if there are GiB of logits: 5 GiB of parameters, and of gradients at its end."""
    there = {"parameters": 5, "optimizer": state}
    return step_of(
        moment_of(0, phase=Phase.FORWARD, op="aten.mm", **there, activations=1),
        moment_of(499, phase=Phase.FORWARD, op="aten.mm", module="model.norm", **there, activations=activations),
        moment_of(500, **LOSS, **there, activations=activations, workspace=logits),
        moment_of(600, module="model.layers.1.mlp", **there, gradients=1, activations=activations, workspace=0.5),
        moment_of(999, **there, gradients=5, activations=2, workspace=0.5),
        **times,
    )


def memory_of(baseline, *planned, copied_gib=0, pinned_gib=None, device_gib=None, **options):
    """Return the prediction of those steps on an H200."""
    facts = {
        "optimizer": "adamw-fused",
        "grad_in_backward": False,
        "copied_out_bytes": round(copied_gib * GIB),
        "copied_in_bytes": round(copied_gib * GIB),
        "host_pinned_bytes": round((copied_gib if pinned_gib is None else pinned_gib) * GIB),
        "device": DEVICES["h200"],
        "device_memory_bytes": None if device_gib is None else round(device_gib * GIB),
    }
    return Memory(baseline=baseline, planned=planned, **(facts | options))


QWEN = Build(
    name="qwen3-30b-a3b",
    dtype="bfloat16",
    classes={
        "self_attn": "Qwen3MoeAttention",
        "experts": "Qwen3MoeExperts",
        "mlp": "Qwen3MoeSparseMoeBlock",
        "input_layernorm": "Qwen3MoeRMSNorm",
        "q_norm": "Qwen3MoeRMSNorm",
    },
)


def _tensor(index, save, storages):
    num_bytes = math.prod(save.shape) * ITEM_BYTES[save.dtype]
    storage = storages.setdefault(save.storage or f"storage {index}", len(storages))
    return SavedTensor(
        index=index,
        call=0,
        owner=save.owner,
        node=save.node,
        field=save.field,
        occurrence=save.occurrence,
        shape=save.shape,
        stride=tuple(math.prod(save.shape[dim + 1 :]) for dim in range(len(save.shape))),
        offset=0,
        dtype=save.dtype,
        tensor_bytes=num_bytes,
        storage=storage,
        storage_bytes=num_bytes if save.storage_bytes is None else save.storage_bytes,
        requires_grad=save.requires_grad,
        kind=save.kind,
        maker=save.owner if save.kind is Kind.ACTIVATION else None,
    )


def _fqns(saves):
    """Return every module that the saves name, with all around it, the root first."""
    fqns = {"": None}
    for save in saves:
        parts = save.owner.split(".")
        fqns |= {".".join(parts[:n]): None for n in range(1, len(parts) + 1)}
    return sorted(fqns, key=lambda fqn: _first(fqn, saves))


def _first(fqn, saves):
    inside = [index for index, save in enumerate(saves) if _within(save.owner, fqn)]
    return (min(inside, default=0), fqn.count(".") + bool(fqn))


def _within(owner, fqn):
    return not fqn or owner == fqn or owner.startswith(fqn + ".")


def _node(fqn, build):
    own = fqn.rpartition(".")[2]
    class_name = build.classes.get(own, "Linear" if own.endswith("_proj") else own.capitalize() or build.class_name)
    return ModuleNode(
        fqn=fqn,
        fqns=(fqn, *build.aliases.get(fqn, ())),
        class_name=class_name,
        bases=build.bases.get(own, ()),
        num_parameters=1,
        num_trainable=int(fqn not in build.frozen),
        parameter_bytes=0,
    )


def _calls(fqns, saved, build, storages):
    calls = []
    for index, fqn in enumerate(fqns):
        inside = [tensor.index for tensor in saved if _within(tensor.owner, fqn)]
        parent = fqns.index(fqn.rpartition(".")[0]) if fqn else None
        first, end = (min(inside), max(inside) + 1) if inside else (0, 0)
        calls.append(
            ModuleCall(
                index=index,
                fqn=fqn,
                parent=parent,
                first_save=first,
                end_save=end,
                inputs=_numbered(build.inputs.get(fqn, {}), storages),
                outputs=_numbered(build.outputs.get(fqn, {}), storages),
                flops=build.flops.get(fqn, 0),
            )
        )
    return tuple(calls)


def _part(part, call, storages):
    return PartCall(
        region=part.region,
        call=call,
        first_save=part.first,
        end_save=part.end,
        inputs=_numbered(part.inputs, storages),
        outputs=_numbered(part.outputs, storages),
    )


def _function(function, call, storages):
    return FunctionCall(
        family=function.family,
        call=call,
        first_save=function.first,
        end_save=function.end,
        outputs=_numbered(function.outputs, storages),
        flops=function.flops,
        statistics=_numbered(function.statistics, storages),
        keepable=function.keepable,
    )


def _numbered(sizes, storages):
    return tuple((storages.setdefault(name, len(storages)), size) for name, size in sizes.items())
