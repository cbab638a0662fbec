import contextlib
import io

import memopt
from memopt.ir import Action
from tests import models


def traced(**options):
    return memopt.analyze(models.llama(num_hidden_layers=2), models.batch(**options))


def test_one_call_module_node_a_call_with_decisions_in_meta():
    graph = traced()
    plan = memopt.plan(graph, activation_swap="attention")
    view = memopt.analyze.to_fx(plan)
    view.lint()
    calls = [node for node in view.nodes if node.op == "call_module"]
    assert [node.target for node in calls] == [call.fqn for call in graph.calls]
    decided = {node.target: node.meta["decision"].action for node in calls if "decision" in node.meta}
    assert decided == {"model.layers.0.self_attn": Action.SWAP, "model.layers.1.self_attn": Action.KEEP}
    saved = next(node.meta["saved"] for node in calls if node.target == "model.layers.0.self_attn")
    assert saved == graph.saved_in("model.layers.0.self_attn")


def test_arguments_are_the_makers_and_it_prints_with_fx_own_tools():
    view = memopt.analyze.to_fx(traced(seq_length=16))
    by_target = {node.target: node for node in view.nodes if node.op == "call_module"}
    makers = {node.target for node in by_target["model.layers.0.self_attn.q_proj"].args}
    assert makers == {"model.layers.0.input_layernorm"}
    assert "call_module[target=model.layers.1.mlp]" in str(view)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(ImportError):  # needs tabulate
        view.print_tabular()
    assert isinstance(out.getvalue(), str)
