"""What a pass is, and the pipeline that runs them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from memopt.ir import Plan

Observer = Callable[["Pass", Plan, Plan], None]
"""Is told (pass, plan before, plan after): timing, progress and diffs belong to whoever runs the pipeline."""


@dataclass(frozen=True, kw_only=True)
class Pass(ABC):
    """Take a valid plan and return a valid plan with more decisions. Never touch a module, never print."""

    name: ClassVar[str]
    """Its name on the command line; file, class and test are named after it."""

    @abstractmethod
    def run(self, plan: Plan) -> Plan:
        """Return the plan with this pass's decisions added."""


class Pipeline:
    """Run passes in order, verifying the plan before, between and after."""

    def __init__(self, passes: Iterable[Pass], observers: Iterable[Observer] = ()) -> None:
        self.passes = tuple(passes)
        self.observers = tuple(observers)

    def run(self, plan: Plan) -> Plan:
        """Return what the passes make of a plan; raises InvalidPlanError."""
        plan.verify()
        for pass_ in self.passes:
            before, plan = plan, pass_.run(plan)
            plan.verify()
            for observer in self.observers:
                observer(pass_, before, plan)
        return plan
