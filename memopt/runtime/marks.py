"""Tensors that the user wants to stay on the device, whatever a plan says of their region."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memopt.errors import IllegalValueError
from memopt.tensors import storage_key

_marked: dict[int, StorageWeakRef] = {}
"""By storage, not by Python object: autograd hands its hooks another object for the same tensor."""


def mark_not_offload(tensor: torch.Tensor) -> torch.Tensor:
    """Keep a tensor, and every view of it, on the device when fine-grained offload moves its region; returns it."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        raise IllegalValueError("tensor", type(tensor).__name__, "a strided torch.Tensor")
    for key in [key for key, reference in list(_marked.items()) if reference.expired()]:
        _marked.pop(key, None)
    _marked[storage_key(tensor)] = StorageWeakRef(tensor.untyped_storage())
    return tensor


def is_marked(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's storage was marked."""
    return bool(_marked) and storage_key(tensor) in _marked
