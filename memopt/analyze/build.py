"""Put what was observed of a model into a ModuleGraph."""

import inspect
from collections import Counter
from typing import Any

import torch
from torch import nn

from memopt.analyze.observe import Observation, Save
from memopt.ir import KvSharing, ModelFacts, ModuleCall, ModuleGraph, ModuleNode, SavedTensor, TraceInput
from memopt.tensors import storage_key


def build_graph(
    model: nn.Module, seen: Observation, *, name: str, trace_input: TraceInput, notes: tuple[str, ...] = ()
) -> ModuleGraph:
    """Return the graph of an observed forward; saves whose graph was dropped before its end are left out."""
    alive = [index for index, save in enumerate(seen.saves) if save.ticket() is not None]
    place = {index: new for new, index in enumerate(alive)}
    storages: dict[int, int] = {}
    for save in seen.saves:
        storages.setdefault(storage_key(save.tensor), len(storages))
    return ModuleGraph(
        model=_model_facts(model, name),
        input=trace_input,
        modules=module_nodes(model),
        calls=_calls(seen, place),
        saved=_saved(seen, alive, storages),
        flows=tuple(seen.flows),
        held=frozenset(storages[key] for key in seen.held if key in storages),
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
        parameter_bytes=sum(p.nbytes for p in parameters),
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
        parameter_bytes=sum(p.nbytes for p in own),
    )


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


def _calls(seen: Observation, place: dict[int, int]) -> tuple[ModuleCall, ...]:
    """Return the calls with their intervals moved to the places of the saves that are left."""
    before = [0]
    for index in range(len(seen.saves)):
        before.append(before[-1] + (index in place))
    return tuple(
        ModuleCall(
            index=c.index, fqn=c.fqn, parent=c.parent, first_save=before[c.first_save], end_save=before[c.end_save]
        )
        for c in seen.calls
    )


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
        kind=save.kind,
        maker=None if maker is None else seen.calls[maker].fqn,
    )
