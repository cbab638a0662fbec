"""What offloading regions and recomputing parts of layers comes to: what moves, what is made again, what stays."""

from collections.abc import Iterable, Mapping, Set

from memopt.ir.graph import Kind, SavedTensor
from memopt.ir.offload_accounts import GroupAccount, LayerShare, OffloadAccount, RecipeAccount
from memopt.ir.offload_fates import Fates, GroupFate
from memopt.ir.plan import Plan, RegionKey
from memopt.ir.region_groups import RecipeCall, Seen
from memopt.ir.region_search import region_layers

OUTSIDE = "outside of what is offloaded"
REPLAY = "held for a replay"
HELD = "input or output of the model"


class OffloadSums:
    """What a plan's offload and its recomputed parts come to; `gone` is needed to account for what else it does."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._seen = plan, Seen(plan)
        self.fates = Fates(plan, self._seen)
        self.gone: frozenset[int] = self._seen.recipe_saves | self._seen.replayed | self.fates.moved_saves
        """The saves that leave the device, or are made again by a part whose output is not kept."""

    def account(self, *, left: Set[int], needed: Mapping[int, int]) -> OffloadAccount:
        """Return the sums.

        `left` are saves that leave the device by other decisions, `needed` are storages (with their bytes) that these
        hold for a replay.
        """
        graph = self._plan.graph
        stays = self._stays(left, needed)
        sizes = {t.storage: t.storage_bytes for t in graph.saved if _counts(t)}
        moved = {graph.saved[n].storage for n in self.fates.moved_saves}
        groups = tuple(self._group(fate) for fate in self._fates_in_order())
        recipes = tuple(self._recipe(key, calls) for key, calls in _by_key(self._seen.recipes).items())
        return OffloadAccount(
            groups=groups,
            recipes=recipes,
            layers=tuple(self._shares(stays)),
            moved_bytes=sum(group.moved_bytes for group in groups),
            num_tensors=sum(group.num_tensors for group in groups),
            duplicate_bytes=sum(group.duplicate_bytes for group in groups),
            dropped_bytes=sum(recipe.dropped_bytes for recipe in recipes),
            output_bytes=sum(recipe.output_bytes for recipe in recipes),
            input_bytes=sum(dict(pair for recipe in self._seen.recipes for pair in recipe.inputs).values()),
            replay_bytes=max((recipe.replay_bytes for recipe in recipes), default=0),
            repeated_flops=sum(recipe.flops for recipe in recipes),
            saved_bytes=sum(sizes.values()),
            freed_bytes=sum(size for storage, size in sizes.items() if storage not in stays),
            moved_freed_bytes=sum(size for storage, size in sizes.items() if storage in moved - stays.keys()),
            added_bytes=sum(size for storage, (_, size) in stays.items() if storage not in sizes),
            stays=_by_reason(stays.values()),
        )

    def _stays(self, left: Set[int], needed: Mapping[int, int]) -> dict[int, tuple[str, int]]:
        """Return what is on the device between forward and backward: storage -> (why, bytes)."""
        graph, reasons = self._plan.graph, self.fates.reasons
        saved = [t for t in graph.saved if _counts(t)]
        stays = {t.storage: (HELD, t.storage_bytes) for t in saved if t.storage in graph.held}
        for tensor in saved:
            if tensor.index not in self.gone | left:
                stays.setdefault(tensor.storage, (reasons.get(tensor.index, OUTSIDE), tensor.storage_bytes))
        seen = self.fates.seen_inputs
        held = {storage: (REPLAY, size) for storage, size in needed.items() if storage not in seen}
        for storage, fate in (held | self.fates.inputs).items():
            if storage not in graph.held:
                stays.setdefault(storage, fate)
        return stays

    def _fates_in_order(self) -> Iterable[GroupFate]:
        """Return what became of the groups, those that the forward never came to at the end."""
        silent = {RegionKey(fqn, region) for fqn, regions in self._seen.decided.items() for region in regions}
        return [*self.fates.groups.values(), *(GroupFate(key=key) for key in sorted(silent - self.fates.groups.keys()))]

    def _group(self, fate: GroupFate) -> GroupAccount:
        decision = self._plan.decisions[fate.key]
        return GroupAccount(
            key=fate.key,
            action=decision.action,
            why=decision.why,
            num_tensors=fate.num_tensors,
            moved_bytes=fate.moved_bytes,
            duplicate_bytes=fate.duplicate_bytes,
            kept=_by_reason(fate.kept.values()),
        )

    def _recipe(self, key: RegionKey, calls: list[RecipeCall]) -> RecipeAccount:
        saved = self._plan.graph.saved
        inputs = dict(pair for call in calls for pair in call.inputs)
        inside = [saved[n] for call in calls for n in range(call.first_save, call.end_save)]
        asked = {saved[n].storage for n in self._seen.recipe_saves}
        dropped = {t.storage: t.storage_bytes for t in inside if _counts(t) and t.storage not in inputs}
        outputs = {key: size for call in calls for key, size in call.outputs if key in asked and key not in inputs}
        return RecipeAccount(
            key=key,
            why=self._plan.decisions[key].why,
            num_calls=len(calls),
            dropped_bytes=sum(size for storage, size in dropped.items() if storage not in outputs),
            output_bytes=sum(outputs.values()),
            input_bytes=sum(inputs.values()),
            replay_bytes=max(self._replay_bytes(call) for call in calls),
            flops=sum(call.flops for call in calls),
        )

    def _replay_bytes(self, call: RecipeCall) -> int:
        inside = self._plan.graph.saved[call.first_save : call.end_save]
        made = {t.storage: t.storage_bytes for t in inside if _counts(t)} | dict(call.outputs)
        return sum(size for storage, size in made.items() if storage not in dict(call.inputs))

    def _shares(self, stays: Mapping[int, object]) -> Iterable[LayerShare]:
        graph = self._plan.graph
        for layer in region_layers(graph):
            saved = {t.storage: t.storage_bytes for t in graph.saved_in(layer) if _counts(t)}
            if any(t.index in self.gone for t in graph.saved_in(layer)) or layer in self._seen.decided:
                gone = sum(size for storage, size in saved.items() if storage not in stays)
                yield LayerShare(fqn=layer, saved_bytes=sum(saved.values()), gone_bytes=gone)


def _counts(tensor: SavedTensor) -> bool:
    """Tell whether a save takes memory that would be free without it."""
    return tensor.kind not in (Kind.PARAMETER, Kind.BUFFER)


def _by_key(calls: Iterable[RecipeCall]) -> dict[RegionKey, list[RecipeCall]]:
    found: dict[RegionKey, list[RecipeCall]] = {}
    for call in calls:
        found.setdefault(call.key, []).append(call)
    return found


def _by_reason(kept: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Add up (reason, bytes), the largest first."""
    reasons: dict[str, int] = {}
    for reason, size in kept:
        reasons[reason] = reasons.get(reason, 0) + size
    return tuple(sorted(reasons.items(), key=lambda item: (-item[1], item[0])))
