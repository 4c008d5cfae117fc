"""Which arrays must not be written before which are read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.values import crossed

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), min_size=1, max_size=6)


def cells(tensor: torch.Tensor) -> set[int]:
    return set(range(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * 4, 4))


@given(SPANS, st.data())
def test_it_is_what_it_says(spans: list[tuple[int, int]], data: st.DataObject):
    memory = torch.zeros(40)
    values = [memory[start : start + size] for start, size in spans]
    moves = data.draw(st.lists(st.integers(0, 34), min_size=len(spans), max_size=len(spans)))
    stay = data.draw(st.booleans())
    outs = values if stay else [memory[at : at + size] for at, (_, size) in zip(moves, spans, strict=True)]
    both = any(cells(one) & cells(two) for i, one in enumerate(outs) for two in outs[:i])
    others = any(
        cells(value) & cells(out) and not (i == j and value.data_ptr() == out.data_ptr())
        for i, value in enumerate(values)
        for j, out in enumerate(outs)
    )
    lengths = data.draw(st.sampled_from([None, np.array([4 * size for _, size in spans])]))
    if both or others:
        assert crossed(values, outs, lengths=lengths)
    elif all(size for _, size in spans):  # the place of nothing may count as one
        assert not crossed(values, outs, lengths=lengths)


def test_outs_belong_to_the_values_that_they_are_said_to():
    one, two, copy = torch.zeros(3, 4).unbind()
    assert not crossed([one, two], [one, copy, two], [0, 0, 1])
    assert crossed([one, two], [one, copy, two], [1, 0, 1])


@pytest.mark.parametrize("step", [2, 3])
def test_arrays_with_strides_take_all_that_is_in_between(step: int):
    memory = torch.zeros(12)
    assert crossed([memory[:2]], [memory[1::step]])
    assert not crossed([memory[:1]], [memory[1::step]])
