"""Measure a model: ``memopt.analyze(model, inputs)`` is the whole of it, and the package can be called as such."""

import sys
from types import ModuleType
from typing import Any

from memopt.analyze.fx_view import to_fx
from memopt.analyze.trace import analyze
from memopt.analyze.twin import class_of_config
from memopt.ir import ModuleGraph

__all__ = ["analyze", "class_of_config", "to_fx"]


class _CallablePackage(ModuleType):
    """Let ``memopt.analyze(model)`` stand beside ``memopt.analyze.to_fx(graph)``."""

    def __call__(self, model: Any, inputs: Any = None, **options: Any) -> ModuleGraph:
        return analyze(model, inputs, **options)


sys.modules[__name__].__class__ = _CallablePackage
