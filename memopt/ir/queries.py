"""Questions about a module graph that networkx answers."""

import networkx

from memopt.ir.graph import ModuleGraph


def as_networkx(graph: ModuleGraph) -> networkx.DiGraph:
    """Build the directed graph that `ModuleGraph.to_networkx` documents."""
    digraph = networkx.DiGraph(name=graph.model.name)
    digraph.add_nodes_from((node.fqn, {"module": node}) for node in graph.modules)
    for node in graph.modules:
        for fqn in filter(None, node.fqns):
            parent, _, name = fqn.rpartition(".")
            edge = (graph.by_fqn[parent].fqn, node.fqn)
            names = digraph.edges[edge]["names"] if digraph.has_edge(*edge) else ()
            digraph.add_edge(*edge, kind="contains", names=(*names, name))
    for maker, user in graph.flows:
        edge = (graph.calls[maker].fqn, graph.calls[user].fqn)
        kind = "contains" if digraph.has_edge(*edge) and digraph.edges[edge]["kind"] == "contains" else "flows"
        digraph.add_edge(*edge, kind=kind, flows=True)
    return digraph


def _called(digraph: networkx.DiGraph, fqn: str) -> tuple[str, ...]:
    """Return a module, or in the place of a list the modules that it holds."""
    node = digraph.nodes[fqn]["module"]
    if "ModuleList" not in (node.class_name, *node.bases):
        return (fqn,)
    return tuple(child for _, child, edge in digraph.out_edges(fqn, data=True) if edge["kind"] == "contains")


def outermost(graph: ModuleGraph, name: str) -> tuple[str, ...]:
    """Return the FQNs of the modules registered as `name`, none of them inside another.

    Depth first over children in registration order from the root; the inside of a hit is not searched, and a shared
    module is one hit, in the place of its first discovery (RFC section 6.1). A list of modules, which has no forward,
    stands for those that it holds.
    """
    digraph = graph.to_networkx()
    hits: dict[str, None] = {}
    seen: set[str] = set()

    def visit(parent: str) -> None:
        for _, child, edge in digraph.out_edges(parent, data=True):
            if name in edge.get("names", ()):
                hits.update(dict.fromkeys(_called(digraph, child)))
            elif edge["kind"] == "contains" and child not in seen:
                seen.add(child)
                visit(child)

    visit("")
    return tuple(hits)
