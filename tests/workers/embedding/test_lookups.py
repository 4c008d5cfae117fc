import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore import Table, UsageError
from workers.embedding.lookups import contains, look_up

GROWING, FIXED = Table(dim=2), Table(shape=(10, 2))


@given(st.lists(st.integers(-5, 5)), st.none() | st.integers(-5, 5))
def test_each_position_finds_its_id(ids: list[int], padding: int | None) -> None:
    found = look_up("t", GROWING, torch.tensor(ids, dtype=torch.int64), padding)
    assert found.ids.tolist() == sorted(set(ids) - {padding})
    assert found.padded == (padding in ids)
    with_padding = [*found.ids.tolist(), padding]
    assert [with_padding[position] for position in found.inverse.tolist()] == ids


def test_the_shape_and_int32_are_kept() -> None:
    found = look_up("t", FIXED, torch.tensor([[3, 1], [3, 9]], dtype=torch.int32))
    assert (found.ids.dtype, found.inverse.tolist()) == (torch.int64, [[1, 0], [1, 2]])


def test_ids_that_are_not_in_the_table() -> None:
    with pytest.raises(UsageError, match=r"id 10 at position 1 is not in table 'item', whose ids are from 0 to 9"):
        look_up("item", FIXED, [[0, 10]])
    with pytest.raises(UsageError, match=r"id -1 at position 2"):
        look_up("item", FIXED, [0, 1, -1])
    with pytest.raises(UsageError, match=r"ids of 'item' must be integers, and at position 0 is .*0\.5"):
        look_up("item", GROWING, torch.tensor([0.5]))


@given(st.sets(st.integers(0, 8)), st.sets(st.integers(0, 8)))
def test_contains(ids: set[int], wanted: set[int]) -> None:
    tensors = [torch.tensor(sorted(each), dtype=torch.int64) for each in (ids, wanted)]
    assert contains(*tensors) == (wanted <= ids)


def test_ids_that_are_the_same() -> None:
    given_ids = torch.tensor([[1, 2]])
    found = look_up("t", GROWING, given_ids)
    assert found.matches(given_ids)
    assert found.matches(given_ids.clone())
    assert not found.matches(given_ids[0])
    assert not found.matches(given_ids + 1)
    assert not found.matches(given_ids.int())


def test_ids_that_have_changed() -> None:
    given_ids = torch.tensor([1, 2])
    found = look_up("t", GROWING, given_ids)
    given_ids += 1
    assert not found.matches(given_ids)
    array = np.array([1, 2])
    found = look_up("t", GROWING, array)
    array += 1
    assert not found.matches(torch.from_numpy(array))
    with torch.inference_mode():
        assert look_up("t", GROWING, torch.tensor([3])).matches(torch.tensor([3]))
