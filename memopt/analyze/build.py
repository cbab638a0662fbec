"""Put what was observed of a model into a ModuleGraph."""

import inspect
from collections import Counter
from itertools import accumulate, chain
from typing import Any

import torch
from torch import nn

from memopt.analyze.functions import is_keepable
from memopt.analyze.observation import Observation, Save
from memopt.ir import (
    FunctionCall,
    KvSharing,
    ModelFacts,
    ModuleCall,
    ModuleGraph,
    ModuleNode,
    PartCall,
    SavedTensor,
    TraceInput,
)
from memopt.tensors import storage_key


def build_graph(
    model: nn.Module, seen: Observation, *, name: str, trace_input: TraceInput, notes: tuple[str, ...] = ()
) -> ModuleGraph:
    """Return the graph of an observed forward; saves whose graph was dropped before its end are left out."""
    alive = [index for index, save in enumerate(seen.saves) if save.ticket() is not None]
    place = _places(len(seen.saves), alive)
    storages = _storages(seen)
    return ModuleGraph(
        model=_model_facts(model, name),
        input=trace_input,
        modules=module_nodes(model),
        calls=_calls(seen, place, storages),
        saved=_saved(seen, alive, storages),
        flows=tuple(seen.flows),
        held=frozenset(storages[key] for key in seen.held if key in storages),
        functions=_functions(seen, place, storages),
        parts=_parts(seen, place, storages),
        checkpointed=tuple(seen.checkpointed),
        notes=notes,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _model_facts(model: nn.Module, name: str) -> ModelFacts:
    import transformers

    parameters = tuple(model.parameters())
    return ModelFacts(
        name=name,
        class_name=type(model).__name__,
        num_parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(map(_num_bytes, parameters)),
        transformers_version=transformers.__version__,
        native_checkpointing=any(_checkpoints_natively(m) for m in model.modules()),
        kv_sharing=_kv_sharing(model),
    )


def module_nodes(model: nn.Module) -> tuple[ModuleNode, ...]:
    """Return the modules of a live model; no forward is needed for that, nor memory for its weights."""
    fqns: dict[nn.Module, list[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        fqns.setdefault(module, []).append(fqn)
    return tuple(_node(module, tuple(names)) for module, names in fqns.items())


def _node(module: nn.Module, fqns: tuple[str, ...]) -> ModuleNode:
    own = tuple(module.parameters(recurse=False))
    return ModuleNode(
        fqn=fqns[0],
        fqns=fqns,
        class_name=type(module).__name__,
        bases=_bases(type(module)),
        num_parameters=sum(p.numel() for p in own),
        num_trainable=sum(p.numel() for p in own if p.requires_grad),
        parameter_bytes=sum(map(_num_bytes, own)),
    )


def _num_bytes(parameter: torch.Tensor) -> int:
    """Return the bytes of a parameter, 0 for one without a storage of its own (sparse)."""
    return parameter.nbytes if parameter.layout is torch.strided else 0


def _bases(cls: type) -> tuple[str, ...]:
    """Return the names of a class's ancestors; a rewritten module's class has the name of the one it stands before."""
    names = (c.__name__ for c in cls.__mro__ if issubclass(c, nn.Module) and c is not nn.Module)
    return tuple(name for name in dict.fromkeys(names) if name != cls.__name__)


def _checkpoints_natively(module: nn.Module) -> bool:
    return bool(getattr(module, "supports_gradient_checkpointing", False)) and hasattr(
        module, "gradient_checkpointing_enable"
    )


def _kv_sharing(model: nn.Module) -> KvSharing:
    """Tell how layers share keys and values: newer models hand a dict to their layers, older ones need the cache."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    if not getattr(text, "num_kv_shared_layers", 0):
        return KvSharing.NONE
    takes_dict = any("shared_kv_states" in inspect.signature(m.forward).parameters for m in model.modules())
    return KvSharing.DICT if takes_dict else KvSharing.CACHE


def _places(num_saves: int, alive: list[int]) -> list[int]:
    """Return how many of the saves that are left came before each one, and before the end."""
    left = set(alive)
    return list(accumulate((index in left for index in range(num_saves)), initial=0))


def _storages(seen: Observation) -> dict[int, int]:
    """Return the storages by number: those of saves first, then what else calls, functions and parts know."""
    storages: dict[int, int] = {}
    inputs = (key for call in seen.calls for key in call.inputs)
    outputs = (storage_key(tensor) for function in seen.functions for tensor in function.outputs)
    returned = (key for call in seen.calls for key in call.outputs)
    parts = (key for part in seen.parts for key in (*part.inputs, *part.outputs))
    for key in chain((storage_key(save.tensor) for save in seen.saves), inputs, outputs, returned, parts):
        storages.setdefault(key, len(storages))
    return storages


def _calls(seen: Observation, place: list[int], storages: dict[int, int]) -> tuple[ModuleCall, ...]:
    return tuple(
        ModuleCall(
            index=call.index,
            fqn=call.fqn,
            parent=call.parent,
            first_save=place[call.first_save],
            end_save=place[call.end_save],
            inputs=_sizes(call.inputs, storages),
            outputs=_sizes(call.outputs, storages),
            flops=call.flops,
        )
        for call in seen.calls
    )


def _functions(seen: Observation, place: list[int], storages: dict[int, int]) -> tuple[FunctionCall, ...]:
    return tuple(
        FunctionCall(
            family=function.family,
            call=function.call,
            first_save=place[function.first_save],
            end_save=place[function.end_save],
            outputs=tuple({storages[storage_key(t)]: t.untyped_storage().nbytes() for t in function.outputs}.items()),
            flops=function.flops,
            statistics=_sizes(function.statistics, storages),
            keepable=is_keepable(function),
        )
        for function in seen.functions
    )


def _parts(seen: Observation, place: list[int], storages: dict[int, int]) -> tuple[PartCall, ...]:
    return tuple(
        PartCall(
            region=part.region,
            call=part.call,
            first_save=place[part.first_save],
            end_save=place[part.end_save],
            inputs=_sizes(part.inputs, storages),
            outputs=_sizes(part.outputs, storages),
        )
        for part in seen.parts
    )


def _sizes(sizes: dict[int, int], storages: dict[int, int]) -> tuple[tuple[int, int], ...]:
    """Return (number of the storage, bytes) for what was noted by storage."""
    return tuple((storages[key], size) for key, size in sizes.items())


def _saved(seen: Observation, alive: list[int], storages: dict[int, int]) -> tuple[SavedTensor, ...]:
    occurrences: Counter[Any] = Counter()
    saved = []
    for new, index in enumerate(alive):
        save = seen.saves[index]
        role = (save.call, save.node, save.field)
        saved.append(_saved_tensor(seen, save, new, storages, occurrences[role]))
        occurrences[role] += 1
    return tuple(saved)


def _saved_tensor(seen: Observation, save: Save, index: int, storages: dict[int, int], occurrence: int) -> SavedTensor:
    tensor = save.tensor
    _, maker = seen.makers.get(storage_key(tensor), (None, None))
    return SavedTensor(
        index=index,
        call=save.call,
        owner=seen.calls[save.call].fqn,
        node=save.node,
        field=save.field,
        occurrence=occurrence,
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        offset=int(tensor.storage_offset()),
        dtype=dtype_name(tensor.dtype),
        tensor_bytes=tensor.numel() * tensor.element_size(),
        storage=storages[storage_key(tensor)],
        storage_bytes=tensor.untyped_storage().nbytes(),
        requires_grad=save.requires_grad,
        cast_of=None if save.cast_of is None else storages[save.cast_of],
        kind=save.kind,
        maker=None if maker is None else seen.calls[maker].fqn,
    )
