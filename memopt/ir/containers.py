"""Find the layers of a model: the numbered containers in which its towers keep them."""

from collections.abc import Mapping
from dataclasses import dataclass

import networkx

from memopt.errors import NoLayerContainerError
from memopt.ir.container_search import search
from memopt.ir.graph import ModuleGraph
from memopt.ir.layer_registry import LAYER_PATHS, WRAPPED, Paths, known
from memopt.ir.stacks import containment, layers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """The layers of one tower of a model."""

    role: str
    """``language`` for the main tower, also of an unknown model; ``encoder`` and ``decoder`` where it has both."""
    fqn: str
    layers: tuple[str, ...]
    """FQNs in order; a layer that is used twice stands once."""


def layer_containers(graph: ModuleGraph) -> tuple[Container, ...]:
    """Return the layers of each tower; raises NoLayerContainerError if there are none.

    A registered class is looked up and never guessed about; else ``model.layers`` or ``layers`` is taken, and in an
    unknown tree the container that looks most like a language tower.
    """
    tree = containment(graph)
    root = unwrap(graph)
    class_name = graph.by_fqn[root].class_name
    if paths := known(graph.by_fqn[root], LAYER_PATHS):
        found = _registered(graph, tree, root, paths)
        if "language" not in found:
            raise NoLayerContainerError(class_name, paths["language"])
    elif main := _first(graph, tree, root, ("model.layers", "layers")):
        found = {"language": main}
    elif not (found := search(tree, root)):
        raise NoLayerContainerError(class_name)
    return tuple(Container(role=role, fqn=fqn, layers=layers_of(tree, fqn)) for role, fqn in found.items())


def unwrap(graph: ModuleGraph, fqn: str = "") -> str:
    """Return the FQN of the model inside any wrappers (retrieval, PEFT, DDP, compile) around it."""
    paths = known(graph.by_fqn[fqn], WRAPPED) or ()
    inner = next((name for path in paths if (name := _join(fqn, path)) in graph.by_fqn), None)
    return fqn if inner is None else unwrap(graph, graph.by_fqn[inner].fqn)


def _registered(graph: ModuleGraph, tree: networkx.DiGraph, root: str, paths: Mapping[str, Paths]) -> dict[str, str]:
    found = {role: _first(graph, tree, root, candidates) for role, candidates in paths.items()}
    return {role: fqn for role, fqn in found.items() if fqn is not None}


def _first(graph: ModuleGraph, tree: networkx.DiGraph, root: str, paths: Paths) -> str | None:
    """Return the FQN of the first path that leads to layers."""
    nodes = (graph.by_fqn.get(_join(root, path)) for path in paths)
    return next((node.fqn for node in nodes if node and layers_of(tree, node.fqn)), None)


def _join(fqn: str, path: str) -> str:
    return f"{fqn}.{path}" if fqn else path
