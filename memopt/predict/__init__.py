"""Foretell what a training step will take: ``memopt.predict(plan, model)``; the package can be called as such."""

import sys
from types import ModuleType
from typing import Any

from memopt.ir import Memory, Plan
from memopt.predict.predict import predict

__all__ = ["predict"]


class _CallablePackage(ModuleType):
    """Let ``memopt.predict(plan, model)`` be called."""

    def __call__(self, plan: Plan, model: Any, inputs: Any = None, **options: Any) -> Memory:
        return predict(plan, model, inputs, **options)


sys.modules[__name__].__class__ = _CallablePackage
