"""An answer that is given again is what FakeTensorMode would have answered."""

import pytest
import torch

from memopt.predict.mode import CountingMode

ASKED = {
    "product": lambda x, y: x @ y.t(),
    "view": lambda x, y: x.view(-1)[3:].unsqueeze(0),
    "split": lambda x, y: x.split(2, dim=1),
    "in place": lambda x, y: x.add_(y),
    "cast": lambda x, y: x.to(torch.bfloat16),
    "sum": lambda x, y: x.sum(),
    "norm": lambda x, y: torch.nn.functional.layer_norm(x, (6,)),
    "transposed like": lambda x, y: torch.empty_like(x.t()),
    "two": lambda x, y: x.max(dim=-1),
    "attention": lambda x, y: torch.nn.functional.scaled_dot_product_attention(*(3 * [x.view(1, 1, 4, 6)])),
    "conjugate": lambda x, y: torch.complex(x, y).conj() * 2,
    "scalar": lambda x, y: x * 2,
    "bits": lambda x, y: x.view(torch.int16),
}


def looks(out, operands):
    storages = [t.untyped_storage()._cdata for t in operands]

    def looks_of(tensor):
        storage = tensor.untyped_storage()
        shares = storages.index(storage._cdata) if storage._cdata in storages else None
        same = [operand is tensor for operand in operands]
        geometry = tensor.shape, tensor.stride(), tensor.storage_offset(), storage.nbytes()
        return geometry, tensor.dtype, tensor.device, tensor.is_conj(), shares, same, type(tensor)

    return [looks_of(t) for t in (out if isinstance(out, (tuple, list)) else [out])]


def asked(mode, function):
    with mode, torch.no_grad():
        operands = torch.empty(4, 6), torch.empty(4, 6)
        return looks(function(*operands), operands)


@pytest.mark.parametrize("function", ASKED.values(), ids=ASKED)
def test_the_second_answer_is_torch_s_own(function, monkeypatch):
    mode = CountingMode()
    first, again = asked(mode, function), asked(mode, function)
    plain = CountingMode()
    monkeypatch.setattr(plain._answers, "answer", lambda func, args, kwargs, ask: ask())
    assert first == again == asked(plain, function)


def test_numbers_of_another_kind_are_another_question():
    mode = CountingMode()
    with mode:
        whole = torch.empty(3, dtype=torch.int64)
        assert [(whole * number).dtype for number in (1, 1.0, True, 1)] == [
            torch.int64, torch.float32, torch.int64, torch.int64
        ]  # fmt: skip


def test_another_default_dtype_is_another_question():
    mode, before = CountingMode(), torch.get_default_dtype()
    with mode:
        whole = torch.empty(3, dtype=torch.int64)
        assert (whole / whole).dtype is torch.float32
        try:
            torch.set_default_dtype(torch.float64)
            assert (whole / whole).dtype is torch.float64
        finally:
            torch.set_default_dtype(before)


def test_operands_of_another_layout_are_another_question():
    mode = CountingMode()
    with mode:
        wide = torch.empty(4, 6)
        strides = [(t + 1).stride() for t in (wide, wide.t(), wide[:, ::2], wide)]
    assert strides == [(6, 1), (1, 6), (3, 1), (6, 1)]


def test_what_depends_on_values_is_asked_each_time():
    mode = CountingMode()
    with mode:
        constants = [torch.tensor(value) for value in (1.0, 2.0)]
        assert [float(constant) for constant in constants] == [1.0, 2.0]
