"""Find the regions of a traced model: the saved tensors of each, layer by layer, and what lies in none."""

from collections.abc import Iterable
from dataclasses import dataclass

from memopt.errors import NoLayerContainerError
from memopt.ir.containers import layer_containers
from memopt.ir.graph import Kind, ModuleCall, ModuleGraph, SavedTensor
from memopt.ir.layers import outermost_of
from memopt.ir.regions import ALL_REGIONS, FUSED_GROUP_MLP, FUSED_PARTS, Save, regions_in


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionLine:
    """What one region, or what lies in none, comes to over the whole model: activations only."""

    region: str
    """Empty for what lies in none."""
    num_groups: int
    """How many layers save activations in it."""
    num_tensors: int
    """How many storages; one that several layers save counts once."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionSummary:
    """The regions of a model. A storage counts in each region that saves it, so that the lines do not add up."""

    num_layers: int
    regions: tuple[RegionLine, ...]
    """Every region that there is, those that the model does not have with nothing in them."""
    unnamed: RegionLine
    """What layers save in no region."""
    outside: RegionLine
    """What is saved outside of layers."""


def region_layers(graph: ModuleGraph) -> tuple[str, ...]:
    """Return the layers in which something is saved, in order; none for a model without containers of layers.

    What is of the same class as the layers of a container is one too, wherever it is: heads that predict further tokens.
    """
    try:
        containers = layer_containers(graph)
    except NoLayerContainerError:
        return ()
    numbered = (layer for container in containers for layer in container.layers)
    # A list of layers in a list is numbered too, and is not called.
    layers = dict.fromkeys(layer for layer in numbered if graph.saved_in(layer))
    kinds = {graph.by_fqn[layer].class_name for layer in layers}
    layers |= dict.fromkeys(node.fqn for node in graph.modules if node.class_name in kinds)
    return tuple(layer for layer in outermost_of(graph, layers) if graph.saved_in(layer))


def parts_of_layers(graph: ModuleGraph) -> tuple[str, ...]:
    """Return by which names layers have their parts in which something is saved."""
    layers = set(region_layers(graph))
    parts = (node.fqn.rpartition(".") for node in graph.modules)
    found = [name for around, _, name in parts if around in layers and graph.saved_in(f"{around}.{name}")]
    return tuple(dict.fromkeys(found))


def outermost_calls(graph: ModuleGraph, fqn: str) -> tuple[ModuleCall, ...]:
    """Return the calls of a module in which something is saved, those within its own calls left out."""
    calls: list[ModuleCall] = []
    for call in graph.calls_of(fqn):
        if call.first_save < call.end_save and not (calls and call.first_save < calls[-1].end_save):
            calls.append(call)
    return tuple(calls)


def path_in(graph: ModuleGraph, layer_fqn: str, owner: str) -> str:
    """Return a module's path from a layer by the first of its names that leads there; its FQN if none does."""
    names = graph.by_fqn[owner].fqns
    if layer_fqn in names:
        return ""
    return next((name.removeprefix(f"{layer_fqn}.") for name in names if name.startswith(f"{layer_fqn}.")), owner)


def layer_regions(
    graph: ModuleGraph, layer_fqn: str, claimed: Iterable[str] = ()
) -> dict[str, tuple[SavedTensor, ...]]:
    """Return what each region of a layer saves, over all calls of the layer; ``""`` has what lies in none."""
    claimed = tuple(claimed)
    regions: dict[str, list[SavedTensor]] = {}
    for call in outermost_calls(graph, layer_fqn):
        saved = graph.saved[call.first_save : call.end_save]
        saves = [Save(path_in(graph, layer_fqn, tensor.owner), tensor.node) for tensor in saved]
        for tensor, region in zip(saved, regions_in(saves, claimed), strict=True):
            regions.setdefault(region, []).append(tensor)
    return {region: tuple(tensors) for region, tensors in regions.items()}


def regions(graph: ModuleGraph) -> tuple[str, ...]:
    """Return the names of the regions that a traced model has, in the order of a forward; ``fused_group_mlp`` is none."""
    names = (line.region for line in region_summary(graph).regions if line.num_groups)
    return tuple(name for name in names if name != FUSED_GROUP_MLP)


def region_summary(graph: ModuleGraph) -> RegionSummary:
    """Return what every region of a model comes to, what layers save besides, and what is saved outside of them."""
    layers = {layer: layer_regions(graph, layer) for layer in region_layers(graph)}
    inside = {t.index for regions in layers.values() for tensors in regions.values() for t in tensors}
    parts = {region: (region,) for region in (*ALL_REGIONS, "")} | {FUSED_GROUP_MLP: FUSED_PARTS}
    lines = {
        region: _line(region, [[t for name in names for t in has.get(name, ())] for has in layers.values()])
        for region, names in parts.items()
    }
    return RegionSummary(
        num_layers=len(layers),
        regions=tuple(lines[region] for region in ALL_REGIONS),
        unnamed=lines[""],
        outside=_line("", [[tensor for tensor in graph.saved if tensor.index not in inside]]),
    )


def _line(region: str, groups: Iterable[Iterable[SavedTensor]]) -> RegionLine:
    activations = [[tensor for tensor in group if tensor.kind is Kind.ACTIVATION] for group in groups]
    sizes = {tensor.storage: tensor.storage_bytes for group in activations for tensor in group}
    return RegionLine(
        region=region,
        num_groups=sum(any(tensor.storage_bytes for tensor in group) for group in activations),
        num_tensors=len(sizes),
        num_bytes=sum(sizes.values()),
    )
