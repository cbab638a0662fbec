"""Every case runs on an engine that moves all it is given and spoils what is read too early."""

import gc

import pytest
import torch

from tests.cases.rewriting import GRAINS
from tests.runtime.engines import cpu_engine


@pytest.fixture(autouse=True, scope="module")
def collector_without_imports():
    """Spare the collector, which every case calls, all that was imported: it takes half of the time else."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def engine():
    """A poisoned engine in the CPU's place; in the end nothing may be left in it."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        with cpu_engine(poison=True) as engine:
            yield engine
    finally:
        torch.set_num_threads(num_threads)


@pytest.fixture(params=GRAINS)
def grain(request):
    return request.param
