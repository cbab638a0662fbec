"""Note the storages of a forward: which call made each, and the sizes of those that go into calls and come out."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memopt.analyze.arguments import tensors_in, unseen
from memopt.analyze.observation import Observation
from memopt.tensors import source_of_casts, storage_key


def note_maker(seen: Observation, tensor: torch.Tensor, call: int | None) -> None:
    """Note that a call made a tensor's storage, unless it is known already."""
    if tensor.layout is torch.strided and (key := storage_key(tensor)) not in seen.makers:
        seen.makers[key] = (StorageWeakRef(tensor.untyped_storage()), call)


@unseen
def sizes_in(seen: Observation, tree: Any, call: int | None, *, ignored: frozenset[int]) -> dict[int, int]:
    """Return storage -> bytes of the tensors in arguments or results, `ignored` ones left out.

    A storage that is not known yet was made by `call`.
    """
    tensors = [tensor for tensor in tensors_in(tree) if storage_key(tensor) not in ignored]
    for tensor in tensors:
        note_maker(seen, tensor, call)
    return {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}


@unseen
def results_in(seen: Observation, tree: Any, call: int, *, ignored: frozenset[int]) -> dict[int, int]:
    """Return storage -> bytes of what a call returned; `drop_written` takes out later what is written to then."""
    results = sizes_in(seen, tree, call, ignored=ignored)
    for tensor in tensors_in(tree):
        if storage_key(tensor) in results and not tensor.is_inference():
            seen.returned.append((tensor.detach(), tensor._version, results))
            if tensor.grad_fn is not None:
                seen.returned_by[source_of_casts(tensor)] = storage_key(tensor)
    return results


def drop_written(seen: Observation) -> None:
    """Leave out of the results of calls what was written to after they returned: it is not what they made."""
    for tensor, version, results in seen.returned:
        if tensor._version != version:
            results.pop(storage_key(tensor), None)
    seen.returned.clear()
    seen.returned_by.clear()
