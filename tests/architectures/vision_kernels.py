"""Let torchvision be imported, which timm wants, where its kernels are built for another torch than the one here."""

import importlib.util
from pathlib import Path

import torch

_OPERATORS = ("nms", "qnms")
"""Those whose shapes torchvision registers without a look whether they are there; no model here calls them."""


def declared_kernels():
    """Return a library of the operators that torchvision misses; they are declared for as long as it is kept."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None:
        return None
    try:
        torch.ops.load_library(Path(spec.origin).parent / "_C.so")
    except OSError:  # PyPI has it for CUDA alone
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in _OPERATORS:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None
