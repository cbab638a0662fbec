"""Read the autograd graph: which node holds which saved tensor. Nothing is unpacked by looking."""

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_iter

_RAW = "_raw_saved_"


def packed_saves(output: Any, *, since: int = 0) -> Iterator[tuple[str, str, Any]]:
    """Yield (node name, field, what the pack hook returned) of every save that backward from an output can reach.

    Nearest nodes first. `since` leaves out the nodes made before that sequence number, and what lies behind them.
    A field that holds several tensors is numbered: ``saved_tensors[0]``.
    """
    for node in _nodes(output, since):
        yield from ((node.name(), field, packed) for field, packed in saves_of(node))


def saves_of(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield (field, what the pack hook returned) of every save of one node."""
    for name, raw in _raw_saves(node):
        field = "saved_tensors" if name == "_raw_saved_tensors" else name.removeprefix(_RAW)
        if not isinstance(raw, (tuple, list)):
            yield field, getattr(raw, "data", None)
            continue
        for position, one in enumerate(raw):
            yield f"{field}[{position}]", getattr(one, "data", None)


def packed_by(node: Any) -> list[Any]:
    """Return what the pack hook returned for every save of one node."""
    packed: list[Any] = []
    for _, raw in _raw_saves(node):
        if isinstance(raw, (tuple, list)):
            packed += [getattr(one, "data", None) for one in raw]
        else:
            packed.append(getattr(raw, "data", None))
    return packed


def _raw_saves(node: Any) -> list[tuple[str, Any]]:
    raw = []
    for name in _fields(type(node)):
        try:
            raw.append((name, getattr(node, name)))
        except RuntimeError:  # backward went through this node already, and freed it
            continue
    return raw


_fields_of: "weakref.WeakKeyDictionary[type, tuple[str, ...]]" = weakref.WeakKeyDictionary()


def _fields(kind: type) -> tuple[str, ...]:
    if (names := _fields_of.get(kind)) is None:
        names = _fields_of[kind] = tuple(name for name in dir(kind) if name.startswith(_RAW))
    return names


def sequence_number() -> int:
    """Return the number that the next node of this thread's forward will get."""
    return torch._C._autograd._get_sequence_nr()


def _nodes(output: Any, since: int) -> Iterator[Any]:
    roots: Iterable[Any] = (leaf.grad_fn for leaf in _leaves(output) if isinstance(leaf, torch.Tensor))
    todo = deque(dict.fromkeys(node for node in roots if node is not None and node._sequence_nr() >= since))
    seen = set(todo)
    while todo:
        node = todo.popleft()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen and following._sequence_nr() >= since:
                seen.add(following)
                todo.append(following)


def _leaves(output: Any) -> list[Any]:
    try:
        return list(tree_iter(output))
    except RecursionError:  # it holds itself
        return []
