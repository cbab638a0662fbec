"""The tensors in whatever modules and functions are called with."""

import functools
from collections import UserDict
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_iter

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def unseen(look: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Hide from the function modes of a trace what only looks at tensors: to them a layout or a storage is a call."""

    @functools.wraps(look)
    def hidden(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with torch._C.DisableTorchFunction():
            return look(*args, **kwargs)

    return hidden


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors that have a storage; one that a value holds out of sight, as a cache does, is not found."""
    try:
        return [leaf for leaf in tree_iter(_plain(tree)) if isinstance(leaf, torch.Tensor) and _has_storage(leaf)]
    except RecursionError:  # it holds itself
        return []


def _plain(tree: Any) -> Any:
    """Return a tree with dicts for what only looks like one: a tokenizer's batch is a UserDict."""
    if isinstance(tree, UserDict):
        return _plain(tree.data)
    if type(tree) in (tuple, list):
        return [_plain(value) for value in tree]
    if type(tree) is dict:
        return {key: _plain(value) for key, value in tree.items()}
    return tree


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not is_functorch_wrapped_tensor(tensor)  # as vmap's rows are
