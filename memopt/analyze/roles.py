"""Name each save by the autograd node and field that hold it, by walking the graph and reading it."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from memopt.analyze.observe import Observation

_PREFIX = "_saved_"


def name_saves(seen: Observation) -> None:
    """Fill in `node` and `field` of every save that can be reached from the output."""
    fields: dict[type, tuple[str, ...]] = {}
    for node in _nodes(leaf.grad_fn for leaf in tree_iter(seen.output) if isinstance(leaf, torch.Tensor)):
        kind = type(node)
        if kind not in fields:
            fields[kind] = tuple(f for f in dir(node) if f.startswith(_PREFIX) or f == "saved_tensors")
        for field in fields[kind]:
            _name_field(seen, node, field)


def _name_field(seen: Observation, node: Any, field: str) -> None:
    seen.unpacked.clear()
    getattr(node, field)
    indices = seen.unpacked.copy()
    for position, index in enumerate(indices):
        save = seen.saves[index]
        name = field.removeprefix(_PREFIX)
        save.node = node.name()
        save.field = name if field.startswith(_PREFIX) and len(indices) == 1 else f"{name}[{position}]"


def _nodes(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield every autograd node that backward can reach."""
    todo = [node for node in roots if node is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
