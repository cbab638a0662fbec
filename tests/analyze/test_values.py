"""Questions put out of sight to what follows from the inputs: by torch itself, of tensors among numbers."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import memopt
from memopt.analyze.build import build_graph
from memopt.analyze.observe import observe
from memopt.analyze.roles import name_saves
from memopt.errors import TraceError


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


def put_together(rows, lengths):
    offsets = torch.empty(len(lengths) + 1, dtype=torch.long)
    offsets[0] = 0
    offsets[1:] = lengths.cumsum(0) // 2
    return torch.cat([rows[start:stop].sigmoid() for start, stop in pairwise(offsets)])


def filled(rows, lengths):
    picked = torch.full_like(rows[:, 0], True).bool()
    picked[lengths[0] :] = False
    return rows[picked].sigmoid()


FOLLOWED = [cut, shaped, listed, masked, mapped, cut_off, put_together, filled]


@pytest.mark.parametrize("do", FOLLOWED, ids=lambda do: do.__name__)
def test_numbers_that_are_tensors_are_known_where_torch_asks_for_them(do):
    model, inputs = Doing(do), {"rows": torch.randn(12, 8), "lengths": torch.tensor([8, 16])}
    seen = observe(model, (), inputs)
    name_saves(seen)
    fake = memopt.analyze(model, inputs, target_device="cpu")
    assert fake.saved == build_graph(model, seen, name="real", trace_input=fake.input).saved


def written_through_a_view(rows, lengths):
    places = torch.zeros(len(rows))
    places[:1].copy_(rows[:1, 0])
    return rows[: places[0].long() + 1]


def written_in_part(rows, lengths):
    places = torch.empty(2, dtype=torch.long)
    places[0] = 1
    return rows[: places[1]]


def written_after_a_view(rows, lengths):
    places = torch.empty(2, dtype=torch.long)
    first = places[:1]
    places[0], places[1] = 1, 2
    first.copy_(rows[:1, 0])
    return rows[: places[0]]


def written_with_data(rows, lengths):
    places = torch.empty(2, dtype=torch.long)
    places[0] = rows[0, 0].long()
    places[1] = 2
    return rows[: places[1]]


def filled_with_data(rows, lengths):
    places = torch.zeros_like(rows[:, 0])
    places[0] = rows[0, 0]
    return rows[: places[0].long() + 1]


def given_out(rows, lengths):
    places = torch.zeros_like(rows[:, 0])
    torch.add(rows.detach()[:, 0], 1, out=places)
    return rows[: places[0].long() + 1]


def dropped_in_place(rows, lengths):
    places = torch.ones_like(rows[:, 0])
    torch.nn.functional.dropout(places, 0.5, True, True)
    return rows[: places[0].long() + 1]


def written_as_the_second_of_a_list(rows, lengths):
    places = torch.zeros_like(rows[:, 0])
    torch._foreach_copy_([torch.zeros(12), places], [rows[:, 0], rows[:, 1]])
    return rows[: places[0].long() + 1]


UNKNOWN = [written_through_a_view, written_in_part, written_after_a_view, written_with_data, filled_with_data,
           given_out, dropped_in_place, written_as_the_second_of_a_list]  # fmt: skip


@pytest.mark.parametrize("do", UNKNOWN, ids=lambda do: do.__name__)
def test_what_was_not_written_with_known_values_alone_is_not_guessed(do):
    with pytest.raises(TraceError, match="asks for the values of a tensor"):
        memopt.analyze(Doing(do), {"rows": torch.randn(12, 8), "lengths": torch.tensor([8, 16])}, target_device="cpu")
