from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.embedding.lookups import Sort, as_torch, by_position, sort_for

LARGE = 2**63 - 1

tables = st.lists(
    st.lists(st.integers(0, 9), max_size=40) | st.lists(st.sampled_from([-3, 0, 7, 2**50, LARGE]), max_size=9),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("sort", [as_torch, by_position])
@given(ids=tables)
def test_each_table_is_sorted_alone(sort: Sort, ids: list[list[int]]) -> None:
    given_ids = [torch.tensor(each, dtype=torch.int64) for each in ids]
    ordered, order = sort(given_ids)
    assert (ordered.dtype, order.dtype) == (torch.int64, torch.int64)
    assert [each.tolist() for each in given_ids] == ids
    for each, values, positions in zip(
        given_ids, ordered.split([*map(len, ids)]), order.split([*map(len, ids)]), strict=True
    ):
        assert values.tolist() == sorted(each.tolist())
        assert torch.equal(each[positions], values)
        expected = torch.sort(each, stable=sort is by_position).indices
        assert torch.equal(positions, expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_ids_that_leave_just_room_for_a_position(size: int) -> None:
    bits = max(size - 1, 1).bit_length()
    for largest in ((1 << (63 - bits)) - 1, 1 << (63 - bits)):
        ids = torch.tensor([largest] * size)
        ordered, order = by_position([ids])
        assert (ordered.tolist(), order.tolist()) == (ids.tolist(), list(range(size)))


def test_the_order_is_torchs_where_torchs_bits_are_promised() -> None:
    assert sort_for(1) is as_torch
    assert sort_for(2) is by_position
    ids = torch.randint(0, 3, (200,), generator=torch.Generator().manual_seed(1))  # too many for an insertion sort
    (_, torchs), (_, positions) = as_torch([ids]), by_position([ids])
    assert not torch.equal(torchs, positions)
