"""Layers that are equal but for their number, as one."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from memopt.ir import Action, TargetAccount
from memopt.report.rows import Row, rows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Targets that save and do the same."""

    targets: tuple[TargetAccount, ...]
    rows: tuple[Row, ...]
    """Those of each one of the targets."""

    @property
    def name(self) -> str:
        """Their FQNs as one, e.g. ``model.layers.0-46.self_attn (x47)``."""
        return folded_name([target.fqn for target in self.targets])

    @property
    def tensors(self) -> tuple[Row, ...]:
        """What is saved, whatever is decided on it: equal for a swapped target and a kept one."""
        return tuple(replace(row, action=Action.KEEP, reason="" if row.covered else row.reason) for row in self.rows)


def fold_targets(targets: Iterable[TargetAccount]) -> tuple[Fold, ...]:
    """Return the targets in order of first appearance, equal ones together."""
    groups: dict[Hashable, list[TargetAccount]] = {}
    for target in targets:
        groups.setdefault(_likeness(target), []).append(target)
    return tuple(Fold(targets=tuple(group), rows=rows_of(group[0])) for group in groups.values())


def folded_name(fqns: Sequence[str]) -> str:
    """Return FQNs that differ in their layer number alone as one name."""
    if len(fqns) == 1:
        return fqns[0]
    before, _, after = split_number(fqns[0])
    numbers = [int(split_number(fqn)[1]) for fqn in fqns]
    return f"{before}{numbers_text(numbers)}{after} (x{len(fqns)})"


def fold_chain(chain: Sequence[str]) -> tuple[str, ...]:
    """Return a chain with each run of equal layers as one name, the order kept."""
    runs: list[list[str]] = []
    for fqn in chain:
        if runs and _follows(runs[-1][-1], fqn):
            runs[-1].append(fqn)
        else:
            runs.append([fqn])
    return tuple(folded_name(run) for run in runs)


def numbers_text(numbers: Sequence[int]) -> str:
    """Return rising numbers as text: ``0-46``, ``0-44 by 4``, ``0,1,5``."""
    steps = {second - first for first, second in pairwise(numbers)}
    if steps == {1}:
        return f"{numbers[0]}-{numbers[-1]}"
    if len(steps) == 1 and len(numbers) > 2:
        return f"{numbers[0]}-{numbers[-1]} by {steps.pop()}"
    return ",".join(_runs_text(numbers))


def split_number(fqn: str) -> tuple[str, str, str]:
    """Return what stands before, in and after the last number of an FQN; the number is empty if there is none."""
    parts = fqn.split(".")
    at = max((n for n, part in enumerate(parts) if part.isdigit()), default=None)
    if at is None:
        return fqn, "", ""
    return "".join(f"{part}." for part in parts[:at]), parts[at], "".join(f".{part}" for part in parts[at + 1 :])


def _likeness(target: TargetAccount) -> Hashable:
    before, number, after = split_number(target.fqn)
    sums = (target.covered_bytes, target.swap_bytes, target.freed_bytes, target.kept, target.recompute)
    return before, bool(number), after, target.class_name, target.action, target.why, sums, rows_of(target)


def _follows(last: str, fqn: str) -> bool:
    (before, number, after), (next_before, next_number, next_after) = split_number(last), split_number(fqn)
    return (
        bool(number and next_number) and (before, after) == (next_before, next_after) and int(next_number) > int(number)
    )


def _runs_text(numbers: Sequence[int]) -> list[str]:
    """Return each run of neighbouring numbers as ``first-last``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
