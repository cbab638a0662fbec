"""Every case runs on an engine that moves all it is given and spoils what is read too early."""

import pytest
import torch

from tests.cases.rewriting import GRAINS
from tests.runtime.engines import cpu_engine


@pytest.fixture(autouse=True)
def engine():
    """A poisoned engine in the CPU's place; in the end nothing may be left in it."""
    torch.manual_seed(0)
    with cpu_engine(poison=True) as engine:
        yield engine


@pytest.fixture(params=GRAINS)
def grain(request):
    return request.param
