"""Note each call of an expensive function, and whether a replay could do with its results instead of calling it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from memopt.analyze.arguments import tensors_in, unseen
from memopt.analyze.observation import Function, Observation, Save
from memopt.ir.op_policy import Family
from memopt.operands import operands_of
from memopt.operations import draws
from memopt.tensors import storage_key, storage_keys


def call_noted(
    seen: Observation, family: Family, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call an expensive function and note what it saved, returned and took."""
    first_save, flops = len(seen.saves), seen.flops()
    operands = unseen(operands_of)(args, kwargs)
    seen.operands = operands or []
    try:
        out = func(*args, **kwargs)
    finally:
        seen.operands = []
    results = _results(out)
    statistics = _statistics(results, seen.saves[first_save:])
    seen.functions.append(
        Function(
            family=family,
            call=seen.active[-1].index,
            first_save=first_save,
            end_save=len(seen.saves),
            flops=seen.flops() - flops,
            outputs=results,
            versions=tuple(result._version for result in results),
            statistics=statistics,
            keepable=operands is not None
            and not draws(func, args, kwargs)
            and _stand_for_it(results, operands, sum(statistics.values())),
        )
    )
    return out


def is_keepable(function: Function) -> bool:
    """Tell, at the end of the forward, whether a function's results can stand for it in a replay."""
    written = any(now._version != then for now, then in zip(function.outputs, function.versions, strict=True))
    return function.keepable and not written


@unseen
def _results(out: Any) -> tuple[torch.Tensor, ...]:
    """Return what a function made, without its graph; what inference mode made has no version, and no backward."""
    return tuple(tensor.detach() for tensor in tensors_in(out) if not tensor.is_inference())


@unseen
def _statistics(results: Sequence[torch.Tensor], saves: Sequence[Save]) -> dict[int, int]:
    own = storage_keys(results)
    made = (save.tensor for save in saves if not save.is_operand and storage_key(save.tensor) not in own)
    return {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in made}


@unseen
def _stand_for_it(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor], statistics_bytes: int) -> bool:
    """Tell whether results are the function's own, and make up most of what it made."""
    sizes = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in results}
    is_own = bool(sizes) and not storage_keys(operands) & sizes.keys()
    return is_own and 2 * statistics_bytes <= sum(sizes.values())
