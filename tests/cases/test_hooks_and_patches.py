"""Hooks and patches of others: around the rewriting, inside it, before it and after it."""

import contextlib
import types

import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from tests.cases.rewriting import assert_at_work, assert_identical, assert_trains_alike, rewritten, trained, twin


class Watched(nn.Module):
    """Put hooks of its own around what is saved in the middle of its forward."""

    packed: list = []

    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        with saved_tensors_hooks(lambda t: Watched.packed.append(t.shape) or t, lambda t: t):
            y = self.up(x).tanh()
        return x + self.down(y)


def test_saved_tensor_hooks_of_the_user_within_and_around(grain):
    """Only the innermost pair of hooks is asked, so that schemes hide each other (pytorch/pytorch#115255)."""
    plain = nn.Sequential(*(Watched() for _ in range(3)), nn.Linear(8, 1))
    model, x = twin(plain, grain), torch.randn(4, 8)
    around, counts = [], []

    def loss_of(module):
        Watched.packed.clear()
        around.clear()
        with saved_tensors_hooks(lambda t: around.append(t.shape) or t.clone(), lambda t: t):
            loss = module(x).exp().mean()
        counts.append((len(Watched.packed), len(around)))
        return loss

    assert_trains_alike(plain, model, loss_of)
    (plain_within, plain_around), (within, still_around) = counts[:2]
    assert counts == counts[:2] * 3
    if grain == "block":
        assert within == plain_within, "the hooks within a region win"
    assert 0 < within <= plain_within
    assert 0 < still_around < plain_around, "those around it get what memopt leaves, and no more"
    assert_at_work(model)


class Adapter(nn.Module):
    """Act on what lies behind a position that the caller may give; without it, not at all."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, position=None):
        y = self.linear(x)
        return y * 0 if position is None else torch.cat([y[:, :position] * 0, y[:, position:]], 1)


class AdaptedBlock(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.base, self.adapter = nn.Linear(width, width), Adapter(width)

    def forward(self, x):
        return x + (self.base(x) + self.adapter(x)).tanh()


@contextlib.contextmanager
def positions(model, position):
    """Hand every adapter a position, as long as this lasts."""
    adapters = [m for m in model.modules() if isinstance(m, Adapter)]
    hooks = [
        m.register_forward_pre_hook(lambda _, args, kwargs: (args, {**kwargs, "position": position}), with_kwargs=True)
        for m in adapters
    ]
    yield
    for hook in hooks:
        hook.remove()


def test_arguments_that_a_hook_adds_during_forward_only(grain):
    """Backward ran without those hooks, and gradients were zero (huggingface/peft#2826)."""
    plain = nn.Sequential(*(AdaptedBlock() for _ in range(3)))
    model, x = twin(plain, grain), torch.randn(2, 5, 6)

    def loss_of(module):
        with positions(module, 2):
            return module(x).square().mean()

    assert_trains_alike(plain, model, loss_of)
    assert all(block.adapter.linear.weight.grad.any() for block in model)
    assert_at_work(model)


class Doubling(ModelHook):
    def pre_forward(self, module, *args, **kwargs):
        return tuple(arg * 2 for arg in args), kwargs


class Mlp(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def with_silu(self, x):
    return x + self.down(functional.silu(self.up(x)))


def patched_and_hooked():
    """Three equal blocks, the second with another forward, the third with a hook of accelerate's."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Mlp() for _ in range(3)))
    blocks[1].forward = types.MethodType(with_silu, blocks[1])
    add_hook_to_module(blocks[2], Doubling())
    return blocks


def test_patched_forwards_and_hooks_that_come_and_go(grain):
    """A patched forward was bound twice, lost, or came back to life (huggingface/accelerate#4255)."""
    plain, model, x = patched_and_hooked(), rewritten(patched_and_hooked(), grain), torch.randn(4, 8)

    def loss_of(module):
        return module(x).square().mean()

    assert_trains_alike(plain, model, loss_of)
    before = trained(model, loss_of)["loss"]
    for module in (plain, model):
        remove_hook_from_module(module, recurse=True)
        add_hook_to_module(module[0], Doubling())
    assert_trains_alike(plain, model, loss_of)
    assert trained(model, loss_of)["loss"] != before
    for module in (plain, model):
        remove_hook_from_module(module, recurse=True)
        del module[1].forward
        module[2].forward = types.MethodType(with_silu, module[2])
    assert_trains_alike(plain, model, loss_of)
    assert_identical({"out": plain(x).detach()}, {"out": model(x).detach()})
    assert_at_work(model)
