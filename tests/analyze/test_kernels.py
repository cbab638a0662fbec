"""Fake kernels answer as real ones do, in what saves and their layouts rest on."""

import pytest
import torch
from torch.nn import functional

from memopt.analyze.fake import TraceMode


def real_and_fake(function, *tensors):
    mode = TraceMode()
    fakes = [mode.from_tensor(tensor) for tensor in tensors]
    with mode:
        fake = function(*fakes)
    return function(*tensors), fake


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("loss", ["mse_loss", "smooth_l1_loss", "soft_margin_loss", "l1_loss", "huber_loss"])
def test_the_storage_of_a_loss_is_as_large_as_its_kernel_makes_it(loss, reduction):
    function = getattr(functional, loss)
    real, fake = real_and_fake(lambda *pair: function(*pair, reduction=reduction), torch.rand(4, 8), torch.rand(4, 8))
    assert fake.shape == real.shape
    assert fake.untyped_storage().nbytes() == real.untyped_storage().nbytes()


LAYOUTS = {
    "heads first": torch.randn(4, 1, 16, 8).transpose(0, 1),
    "tokens first": torch.randn(1, 16, 4, 8).transpose(1, 2),
    "of one tensor": torch.randn(1, 16, 3, 4, 8)[:, :, 0].transpose(1, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_lies_as_its_query(layout):
    real, fake = real_and_fake(functional.scaled_dot_product_attention, *[LAYOUTS[layout]] * 3)
    assert fake.stride() == real.stride()


def test_a_convolution_of_a_view_lies_as_a_real_one():
    def convolved(rows, weight):
        view = rows.permute(0, 2, 1).reshape(1, 32, 4, 4)
        return functional.conv2d(view, weight, stride=2)

    real, fake = real_and_fake(convolved, torch.randn(1, 16, 32), torch.randn(64, 32, 2, 2))
    assert fake.stride() == real.stride()
