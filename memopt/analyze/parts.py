"""Note the calls of those parts of a module's forward that are methods of their own, as an experts' activation is."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from memopt.analyze.observation import Observation, Part
from memopt.analyze.storages import results_in, sizes_in
from memopt.ir.regions import METHODS


@contextmanager
def parts_noted(seen: Observation, module: nn.Module, *, ignored: frozenset[int]) -> Iterator[None]:
    """Note the calls of a module's methods that are parts; what its instance had before it gets back."""
    own = {name: vars(module)[name] for name in METHODS.values() if name in vars(module)}
    noted = {
        name: _noted(seen, getattr(module, name), region, ignored)
        for region, name in METHODS.items()
        if _is_method(module, name)
    }
    try:
        vars(module).update(noted)
        yield
    finally:
        for name in noted:
            vars(module).pop(name, None)
        vars(module).update(own)


def _is_method(module: nn.Module, name: str) -> bool:
    method = getattr(module, name, None)
    return callable(method) and not isinstance(method, nn.Module)


def _noted(seen: Observation, method: Callable[..., Any], region: str, ignored: frozenset[int]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noted(*args: Any, **kwargs: Any) -> Any:
        here, first_save = seen.active[-1].index, len(seen.saves)
        inputs = sizes_in(seen, (args, kwargs), here, ignored=ignored)
        out = method(*args, **kwargs)
        outputs = results_in(seen, out, here, ignored=ignored)
        seen.parts.append(Part(region, here, first_save, len(seen.saves), inputs, outputs))
        return out

    return noted
