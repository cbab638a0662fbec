"""One training step, and what it must not differ in."""

import torch

SWAP = {"activation_swap": "attention"}


def step(model, inputs):
    """Return the loss and the gradients of one step."""
    model.zero_grad()
    loss = model(inputs) if isinstance(inputs, torch.Tensor) else model(**inputs).loss
    loss.backward()
    return loss.detach(), gradients(model)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_gradients(grads, other_grads):
    assert grads.keys() == other_grads.keys()
    assert grads
    for name, grad in grads.items():
        assert torch.equal(grad, other_grads[name]), name


def assert_equal_steps(plain, rewritten, inputs, steps=2):
    for _ in range(steps):
        (loss, grads), (other_loss, other_grads) = step(plain, inputs), step(rewritten, inputs)
        assert torch.equal(loss, other_loss)
        assert_equal_gradients(grads, other_grads)
        assert all(grad.abs().sum() > 0 for grad in grads.values())
