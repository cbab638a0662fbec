"""Compute again in backward what a region did not save, as if its forward ran for the first time."""

from memopt.runtime.replay.run import run_checkpointed

__all__ = ["run_checkpointed"]
