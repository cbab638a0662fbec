"""The torch.fx view of a module graph, for fx's own tools: print it, walk it, look at decisions in ``node.meta``."""

import torch.fx

from memopt.ir import ModuleGraph, Plan


def to_fx(graph: ModuleGraph | Plan) -> torch.fx.Graph:
    """Return a torch.fx.Graph with one ``call_module`` node a module call, in the order in which the calls began.

    A node's arguments are the calls whose tensors it uses, as far as they began earlier. ``meta`` holds ``call`` (the
    ModuleCall), ``module`` (the ModuleNode), ``saved`` (its SavedTensors, children included) and, for a plan,
    ``decision`` where there is one on that module.
    """
    plan = graph if isinstance(graph, Plan) else Plan(graph=graph)
    graph = plan.graph
    view = torch.fx.Graph()
    inputs = view.placeholder("inputs")
    decisions = {graph.by_fqn[key.fqn].fqn: decision for key, decision in plan.decisions.items()}
    nodes: list[torch.fx.Node] = []
    for call in graph.calls:
        makers = sorted(maker for maker, user in graph.flows if user == call.index and maker < user)
        args = tuple(nodes[maker] for maker in makers) or (inputs,)
        node = view.create_node("call_module", call.fqn, args)
        node.meta["call"] = call
        node.meta["module"] = graph.by_fqn[call.fqn]
        node.meta["saved"] = graph.saved[call.first_save : call.end_save]
        if call.fqn in decisions:
            node.meta["decision"] = decisions[call.fqn]
        nodes.append(node)
    view.output(nodes[0] if nodes else inputs)
    return view
