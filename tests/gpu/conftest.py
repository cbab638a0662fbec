"""Everything here needs an accelerator and is skipped where there is none, but for what is rehearsed on the CPU."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="needs CUDA")
    for item in items:
        if "tests/gpu" in str(item.path) and not is_rehearsal(item):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(skip)


def is_rehearsal(item):
    return hasattr(item, "callspec") and item.callspec.params.get("device") == "cpu"


@pytest.fixture(autouse=True)
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@pytest.fixture
def strict(deterministic):
    """Let no kernel be used that adds in any order; of attention's, cuDNN's has no other way."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)
    yield
    torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    return torch.device(request.param)
