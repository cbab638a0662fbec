"""The boundary of a layer: a module in a numbered container."""

import networkx

from memopt.ir.graph import ModuleGraph, ModuleNode


def containment(graph: ModuleGraph) -> networkx.DiGraph:
    """Return the graph of which module contains which, without the data flow."""
    tree = graph.to_networkx()
    tree.remove_edges_from([edge for edge in tree.edges if tree.edges[edge]["kind"] != "contains"])
    return tree


def layers_of(tree: networkx.DiGraph, fqn: str) -> tuple[str, ...]:
    """Return what a ModuleList, or a ModuleDict with digits for keys, contains, in order; nothing for other modules."""
    names = [(name, child) for _, child, edge in tree.out_edges(fqn, data=True) for name in edge["names"]]
    numbered = [(int(name), child) for name, child in names if name.isdecimal()]
    if is_a(tree.nodes[fqn]["module"], "ModuleList") or (
        is_a(tree.nodes[fqn]["module"], "ModuleDict") and len(numbered) == len(names)
    ):
        return tuple(dict.fromkeys(child for _, child in sorted(numbered)))
    return ()


def is_a(node: ModuleNode, class_name: str) -> bool:
    """Tell whether a module's class, or one that it inherits from, has that name."""
    return class_name in (node.class_name, *node.bases)
