"""Parts together with what models are made of: heads that predict further tokens, eight-bit tensors."""

import pytest
import torch
from torch import nn
from torch.nn.functional import silu
from torch.utils._pytree import tree_map

import memopt
from memopt.ir import account
from tests.runtime.engines import cpu_engine
from tests.runtime.layers import Layer, Model
from tests.runtime.offloads import assert_same_step, offload, recompute, rewritten

WIDTH = 32


class Predicting(Model):
    """One layer more for each further token, beside the container of layers."""

    def __init__(self):
        super().__init__(WIDTH)
        self.further = nn.ModuleDict({"first": Layer(WIDTH), "second": Layer(WIDTH)})

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        total = x.square().mean()
        for layer in self.further.values():
            x = layer(x)
            total = total + x.square().mean()
        return total


def hidden(seed=0):
    return torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(seed))


def steps(plain, config, num_layers, steps=4):
    with cpu_engine(poison=True):
        model, handle = rewritten(plain, config, hidden())
        assert sum(layer.gone_bytes > 0 for layer in account(handle.plan).offload.layers) == num_layers
        for seed in range(steps):
            before = handle.stats()
            assert_same_step(plain, model, hidden(seed))
            after = handle.stats()
            assert after.copied_out_bytes - before.copied_out_bytes == account(handle.plan).swap_bytes > 0
    return handle


def test_heads_that_predict_further_tokens_have_regions_too():
    handle = steps(Predicting(), offload("core_attn", "attn_proj", "mlp_fc2") | recompute("layernorm"), num_layers=5)
    assert handle.stats().checkpointed_calls == handle.stats().replayed_calls == 4 * 10


class Quantized(torch.autograd.Function):
    """A product that saves its input in eight bits, as kernels for such weights do."""

    @staticmethod
    def forward(ctx, x, weight, wrap):
        scale = x.detach().abs().amax() / 448
        data = (x.detach() / scale).to(torch.float8_e4m3fn)
        ctx.save_for_backward(Scaled(data, scale) if wrap else data, scale, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        saved, scale, weight = ctx.saved_tensors
        data = saved.data_ if isinstance(saved, Scaled) else saved
        x = data.float() * scale
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2), None


class Scaled(torch.Tensor):
    """Eight-bit values and their scale as one tensor."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32, device=data.device)

    def __init__(self, data, scale):
        self.data_, self.scale_ = data, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].data_, args[0].scale_)
        plain = tree_map(lambda t: t.data_.float() * t.scale_ if isinstance(t, Scaled) else t, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class EightBit(nn.Module):
    wrap = False

    def __init__(self, width):
        super().__init__()
        self.up_proj = nn.Linear(width, 48)
        self.down_proj = EightBitLinear(self.wrap)

    def forward(self, x):
        return self.down_proj(silu(self.up_proj(x)))


class EightBitLinear(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.weight, self.wrap = nn.Parameter(torch.randn(WIDTH, 48)), wrap

    def forward(self, x):
        return Quantized.apply(x, self.weight, self.wrap)


class WrappedEightBit(EightBit):
    wrap = True


def test_eight_bit_tensors_move_as_they_are():
    handle = steps(Model(WIDTH, EightBit), offload("mlp_fc2") | recompute("layernorm"), num_layers=3)
    assert account(handle.plan).swap_bytes == 3 * (2 * 8 * 48 + 4)  # and the scales


@pytest.mark.parametrize(
    "config", [offload("mlp_fc2", "core_attn"), recompute("layernorm")], ids=["offload", "recompute"]
)
def test_a_subclass_that_holds_others_stays_and_comes_back_as_it_was(config):
    plain = Model(WIDTH, WrappedEightBit)
    graph = memopt.analyze(Model(WIDTH, EightBit), hidden())
    with cpu_engine(poison=True):
        model = Model(WIDTH, WrappedEightBit)
        model.load_state_dict(plain.state_dict())
        plan = memopt.plan(graph, **config)
        for (
            module
        ) in model.modules():  # the plan is made of its twin without the subclass: the classes' names are the same
            if type(module) is WrappedEightBit:
                module.__class__ = type("EightBit", (WrappedEightBit,), {})
        memopt.apply(model, plan)
        for seed in range(4):
            assert_same_step(plain, model, hidden(seed))
