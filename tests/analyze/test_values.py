"""Questions put out of sight to what follows from the inputs: by torch itself, of tensors among numbers."""

import pytest
import torch
from torch import nn

import memopt
from memopt.analyze.build import build_graph
from memopt.analyze.observe import observe
from memopt.analyze.roles import name_saves


class Doing(nn.Module):
    """Does something with rows, after a layer, and with lengths, and ends in a layer."""

    def __init__(self, do):
        super().__init__()
        self.do = do
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, rows, lengths):
        return self.after(self.do(self.before(rows), lengths))


def cut(rows, lengths):
    return torch.cat([part.sigmoid() for part in rows.split([length // 2 for length in lengths])])


def shaped(rows, lengths):
    return rows.reshape(lengths[0] // 4, -1, 8).sigmoid()


def listed(rows, lengths):
    return rows[torch.tensor([length // 2 for length in lengths])].sigmoid()


def masked(rows, lengths):
    places = (torch.arange(len(rows)) < lengths[0])[:, None].expand_as(rows)
    return rows[places].view(-1, 8).sigmoid()


def mapped(rows, lengths):
    seen = torch.vmap(lambda position: position.new_ones(()) * (position < lengths[0]))(torch.arange(len(rows)))
    return (rows * seen[:, None]).sigmoid()


def cut_off(rows, lengths):
    different = torch.unique_consecutive(torch.cat([lengths, lengths.flip(0)]))
    return rows[: different.sum()].sigmoid()


@pytest.mark.parametrize("do", [cut, shaped, listed, masked, mapped, cut_off], ids=lambda do: do.__name__)
def test_numbers_that_are_tensors_are_known_where_torch_asks_for_them(do):
    model, inputs = Doing(do), {"rows": torch.randn(12, 8), "lengths": torch.tensor([8, 16])}
    seen = observe(model, (), inputs)
    name_saves(seen)
    fake = memopt.analyze(model, inputs, target_device="cpu")
    assert fake.saved == build_graph(model, seen, name="real", trace_input=fake.input).saved
