"""States of rows as files have them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvstore as kv
from kvstore.rows.frozen_rows import Page
from kvstore.rows.row_table import RowStates, split
from kvstore.rows.stripe import PartSpec


def page(*ids: int) -> Page:
    numbers = np.array(ids)
    rows = np.repeat(numbers[:, None], 2, axis=1).astype(np.float32)
    return Page(numbers, rows, {"seen": numbers, "state.m": rows + 1})


def test_pages_of_several_servers_become_one_file_and_come_back() -> None:
    states = RowStates.of([page(5, 1), page(2)], 7)
    assert (states.ids.tolist(), list(states.parts)) == ([1, 2, 5], ["state.m"])
    array = {("w", "exp_avg"): torch.zeros(3)}
    file = array | {("t", name): value for name, value in states.tensors().items()}
    arrays, tables = split(file, "file")
    assert arrays == array
    assert tables["t"].steps == 7
    assert tables["t"].ids.tolist() == [1, 2, 5]
    assert tables["t"].parts["state.m"].tolist() == [[2, 2], [3, 3], [6, 6]]


def test_rows_that_are_there_take_their_states() -> None:
    states = RowStates.of([page(1, 5)], 7)
    there = Page(np.array([4, 5]), np.zeros((2, 2)), {"seen": np.array([40, 50]), "state.m": np.zeros((2, 2))})
    replaced, places = states.replacing(there)
    assert (replaced.ids.tolist(), places.tolist()) == ([5], [1])
    assert {name: part.tolist() for name, part in replaced.parts.items()} == {"seen": [50], "state.m": [[6, 6]]}
    nothing, places = RowStates.of([], 0).replacing(there)
    assert len(nothing.ids) == len(places) == 0


def test_states_that_rows_do_not_have() -> None:
    states = RowStates.of([page(1)], 7)
    states.require({"seen": PartSpec("int64", 0), "state.m": PartSpec("float32", 2)}, "t", "file")
    for parts in ({"state.m": PartSpec("float32", 3)}, {"state.m": PartSpec("float64", 2)}, {}):
        with pytest.raises(
            kv.UsageError, match=r"file holds m of 2 float32 for each row of table 't'.*keeps (m|nothing)"
        ):
            states.require(parts, "t", "file")


@pytest.mark.parametrize("name", ["rows.ids", "rows.steps", "rows.state.m"])
def test_a_file_that_is_damaged(name: str) -> None:
    tensors = RowStates.of([page(1, 5)], 7).tensors()
    tensors[name] = torch.zeros(3, 1)
    with pytest.raises(kv.UsageError, match="file is damaged: the states of table 't'"):
        split({("t", each): value for each, value in tensors.items()}, "file")
