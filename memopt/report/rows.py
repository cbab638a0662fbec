"""A target's saved tensors as rows: one row a storage, so that the bytes of the rows add up."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from memopt.ir import Action, TargetAccount, TensorLine

SAME_STORAGE = "same storage"
"""The reason of a save whose storage counts in another row of its target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One storage of a target, whoever saves it; it counts where its first save that decides does."""

    saves: tuple[tuple[str, str], ...]
    """(the module that saves it, named from the target inwards; the field of the autograd node)."""
    shape: tuple[int, ...]
    dtype: str
    storage_bytes: int
    action: Action
    reason: str
    covered: bool


def rows_of(target: TargetAccount) -> tuple[Row, ...]:
    """Return the rows of a target in the order of their first save."""
    return tuple(_row(target.fqn, lines) for lines in _by_storage(target))


def deciding_lines(target: TargetAccount) -> frozenset[int]:
    """Return the saves (by their index) that stand for their storages: one a storage, so that their bytes add up."""
    return frozenset(_deciding(lines).tensor.index for lines in _by_storage(target))


def _by_storage(target: TargetAccount) -> Iterable[list[TensorLine]]:
    storages: dict[int, list[TensorLine]] = {}
    for line in target.lines:
        storages.setdefault(line.tensor.storage, []).append(line)
    return storages.values()


def _deciding(lines: list[TensorLine]) -> TensorLine:
    """Return the line that tells what a storage does; if any of its saves is covered, the storage is."""
    return next((line for line in lines if line.covered), lines[0])


def _row(fqn: str, lines: list[TensorLine]) -> Row:
    """Return the row of one storage."""
    deciding = _deciding(lines)
    return Row(
        saves=tuple(dict.fromkeys((_inward(line.tensor.owner, fqn), op_text(line)) for line in lines)),
        shape=deciding.tensor.shape,
        dtype=deciding.tensor.dtype,
        storage_bytes=deciding.tensor.storage_bytes,
        action=deciding.action,
        reason=deciding.reason,
        covered=deciding.covered,
    )


def op_text(line: TensorLine) -> str:
    """Return which field of which autograd node a line is, shortened where the names are long."""
    op = re.sub(r"ScaledDotProduct(\w*)Attention", r"Sdpa\1", line.tensor.op)
    occurrence = f" #{line.tensor.occurrence + 1}" if line.tensor.occurrence else ""
    return f"{op}.{line.tensor.field}{occurrence}"


def shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape as text, e.g. ``1x32x1024x128``."""
    return "x".join(map(str, shape)) or "scalar"


def _inward(owner: str, fqn: str) -> str:
    """Return a module's name as seen from a target; the target itself goes by its own last name."""
    return owner.removeprefix(f"{fqn}.") if owner != fqn else fqn.rpartition(".")[2]
