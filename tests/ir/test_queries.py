from memopt.ir import outermost
from tests.builders import Build, graph_of, mib_save


def test_outermost_does_not_look_inside_a_hit_and_keeps_the_order_of_discovery():
    graph = graph_of(
        mib_save("b.self_attn.self_attn"),
        mib_save("a.deep.er.self_attn"),
        mib_save("self_attn"),
        mib_save("c.attn"),
        mib_save("c.self_attn_norm"),
    )
    assert outermost(graph, "self_attn") == ("b.self_attn", "a.deep.er.self_attn", "self_attn")


def test_a_shared_module_is_one_hit_under_its_first_name():
    graph = graph_of(
        mib_save("a.self_attn"),
        mib_save("b.mlp"),
        mib_save("c.self_attn"),
        build=Build(aliases={"a.self_attn": ("b.self_attn",)}),
    )
    assert outermost(graph, "self_attn") == ("a.self_attn", "c.self_attn")
    assert list(graph.to_networkx().predecessors("a.self_attn")) == ["a", "b"]


def test_a_module_whose_second_name_is_the_one_asked_for():
    graph = graph_of(mib_save("a.attention"), build=Build(aliases={"a.attention": ("a.self_attn",)}))
    assert outermost(graph, "self_attn") == ("a.attention",)


def test_a_list_stands_for_the_modules_that_it_holds():
    """A list has no forward; each layer of LongCat-Flash attends twice."""
    build = Build(classes={"self_attn": "ModuleList"})
    graph = graph_of(mib_save("a.self_attn.0"), mib_save("a.self_attn.1"), build=build)
    assert outermost(graph, "self_attn") == ("a.self_attn.0", "a.self_attn.1")


def test_the_digraph_tells_containers_and_parents():
    digraph = graph_of(mib_save("layers.0.self_attn"), mib_save("layers.1.self_attn")).to_networkx()
    assert list(digraph.successors("layers")) == ["layers.0", "layers.1"]
    assert list(digraph.predecessors("layers.1.self_attn")) == ["layers.1"]
    assert digraph.nodes["layers.0"]["module"].fqn == "layers.0"
