"""Foretell what a training step will take: run the rewritten model on fake tensors and count what is alive."""

from memopt.predict.predict import predict

__all__ = ["predict"]
