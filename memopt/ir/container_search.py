"""Find the layers of a model that no table knows: which of its numbered containers is the language tower's."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, takewhile

import networkx

from memopt.ir.graph import ModuleNode
from memopt.ir.stacks import is_a, layers_of

OTHER_MODALITY = re.compile("vis(ion|ual)|vit|image|video|audio|speech", re.IGNORECASE)


@dataclass(frozen=True, order=True)
class Rank:
    """How much a container looks like the layers of a language tower; the first difference decides."""

    has_parts: bool
    """An element has children: a list of Linears is no tower."""
    language: bool
    """Nothing around it is named after another modality."""
    near_tokens: int
    """How deep the smallest module is that holds both it and the token embedding."""
    checkpointable: bool
    num_parameters: int
    num_layers: int


def search(tree: networkx.DiGraph, root: str) -> dict[str, str]:
    """Return the best container below `root` by role, or both towers of an encoder-decoder."""
    below = networkx.descendants(tree, root)
    fqns = [fqn for fqn in tree if fqn in below]
    tokens = _token_embedding(tree, fqns)
    ranks = {fqn: _rank(tree, root, fqn, tokens) for fqn in _candidates(tree, fqns)}
    if not ranks:
        return {}
    best = max(ranks, key=ranks.__getitem__)
    return _both_towers(ranks, best) or {"language": best}


def _candidates(tree: networkx.DiGraph, fqns: list[str]) -> list[str]:
    """Return the containers that are not inside a layer of another, as the experts of a MoE block are."""
    stacks = {fqn: layers for fqn in fqns if (layers := layers_of(tree, fqn))}
    inside: set[str] = set()
    for layers in stacks.values():
        if _alike([tree.nodes[fqn]["module"] for fqn in layers]):
            inside.update(*(networkx.descendants(tree, fqn) for fqn in layers))
    return [fqn for fqn in stacks if fqn not in inside]


def _alike(layers: list[ModuleNode]) -> bool:
    """Tell whether modules are layers of one stack rather than, say, the towers of a model."""
    return len({node.class_name for node in layers}) == 1 or _checkpointable(layers)


def _checkpointable(layers: Iterable[ModuleNode]) -> bool:
    return all(is_a(node, "GradientCheckpointingLayer") for node in layers)


def _rank(tree: networkx.DiGraph, root: str, fqn: str, tokens: tuple[str, ...]) -> Rank:
    layers = layers_of(tree, fqn)
    inside = set(layers).union(*(networkx.descendants(tree, layer) for layer in layers))
    return Rank(
        has_parts=any(tree.out_degree(layer) for layer in layers),
        language=not any(_other_modality(tree.nodes[name]["module"]) for name in _path(fqn) if len(name) > len(root)),
        near_tokens=max((_shared(fqn, name) for name in tokens), default=0),
        checkpointable=_checkpointable(tree.nodes[layer]["module"] for layer in layers),
        num_parameters=sum(tree.nodes[name]["module"].num_parameters for name in inside),
        num_layers=len(layers),
    )


def _other_modality(node: ModuleNode) -> bool:
    own = node.fqn.rpartition(".")[2]
    return bool(OTHER_MODALITY.search(own) or OTHER_MODALITY.search(node.class_name))


def _token_embedding(tree: networkx.DiGraph, fqns: list[str]) -> tuple[str, ...]:
    """Return the names of the largest embedding."""
    embeddings = [node for fqn in fqns if is_a(node := tree.nodes[fqn]["module"], "Embedding")]
    return max(embeddings, key=lambda node: node.num_parameters).fqns if embeddings else ()


def _both_towers(ranks: dict[str, Rank], best: str) -> dict[str, str]:
    """Return encoder and decoder where the best container is in one and its counterpart stands beside."""
    for around in reversed(_path(best)):
        parent, _, name = around.rpartition(".")
        if name in ("encoder", "decoder"):
            towers = {role: _within(ranks, f"{parent}.{role}" if parent else role) for role in ("encoder", "decoder")}
            if all(towers.values()):
                return {role: max(tower, key=tower.__getitem__) for role, tower in towers.items()}
    return {}


def _within(ranks: dict[str, Rank], fqn: str) -> dict[str, Rank]:
    return {name: rank for name, rank in ranks.items() if name.startswith(f"{fqn}.") and rank.has_parts}


def _path(fqn: str) -> list[str]:
    """Return a module's FQN and those of the modules around it, outermost first."""
    return list(accumulate(fqn.split("."), "{}.{}".format))


def _shared(one: str, other: str) -> int:
    """Return how many modules two FQNs have in common, the root aside."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.split("."), other.split("."), strict=False))
    )
