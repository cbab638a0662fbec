"""Whatever goes wrong in a step, nothing is left of it, and the next step is exact."""

import pytest
import torch

import memopt
from tests import models
from tests.runtime.engines import assert_empty, cpu_engine
from tests.runtime.steps import SWAP, assert_equal_steps


class OutOfMemory(RuntimeError):
    pass


def raising(error):
    def fail(*args):
        raise error

    return fail


def in_forward(model, error):
    return model.blocks[2].mlp.register_forward_pre_hook(raising(error))


def inside_the_region(model, error):
    return model.blocks[1].self_attn.out.register_forward_pre_hook(raising(error))


def after_the_region(model, error):
    return model.blocks[1].self_attn.register_forward_hook(raising(error))


def in_backward(model, error):
    return model.blocks[1].self_attn.qkv.register_full_backward_hook(raising(error))


def in_a_tensor_hook(model, error):
    def watch(module, args, output):
        output.register_hook(raising(error))

    return model.blocks[1].mlp.register_forward_hook(watch)


@pytest.mark.parametrize("error", [OutOfMemory("no more"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("place", [in_forward, inside_the_region, after_the_region, in_backward, in_a_tensor_hook])
def test_the_next_step_is_exact(place, error):
    with cpu_engine(poison=True) as engine:
        plain, model, inputs = models.SharedAttention(), models.SharedAttention(), models.hidden()
        handle = memopt.apply(model, SWAP, inputs)
        for _ in range(2):
            hook = place(model, error)
            with pytest.raises(type(error)) as caught:
                model(inputs).backward()
            hook.remove()
            error.__traceback__ = None  # its frames hold the graph
            del caught
            assert_empty(engine)
            assert_equal_steps(plain, model, inputs, steps=1)
        assert handle.stats().copied_out_tensors > 0


def test_an_error_of_the_policy_itself():
    def broken(tensor):
        raise OutOfMemory("in the policy")

    with cpu_engine():
        attention = memopt.swap_wrapper(models.Attention(), broken)
        with pytest.raises(OutOfMemory):
            attention(models.hidden())
        memopt.undo(attention)
        attention(models.hidden()).sum().backward()


def test_a_failing_copy_is_not_taken_for_data():
    with cpu_engine() as engine:
        model, inputs = models.SharedAttention(), models.hidden()
        memopt.apply(model, SWAP, inputs)
        loss = model(inputs)
        engine.finish()

        def failing_copy(copies, after):
            broken = [(source[:-1], target) for source, target in copies]
            return type(engine.backend).copy_in(engine.backend, broken, after)

        engine.backend.copy_in = failing_copy
        with pytest.raises(RuntimeError, match="copy of a swapped tensor failed"):
            loss.backward()
        del engine.backend.copy_in, loss
        torch.manual_seed(0)
        assert_equal_steps(models.SharedAttention(), model, inputs, steps=1)
