import numpy as np
import pytest
import torch

from kvstore.errors import UsageError
from kvstore.rows.ids import mixed, require_ids, stripes_of
from kvstore.table import Table

FIXED, GROWING = Table(shape=(10, 2)), Table(dim=2)
LARGEST = 2**63 - 1


@pytest.mark.parametrize(
    "given",
    [[[1, 2], [3, 4]], torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), np.array([[1, 2], [3, 4]], np.uint8)],
)
def test_integers_of_any_kind_and_shape_are_taken(given):
    ids = require_ids("ids", given, FIXED)
    assert ids.dtype == np.int64
    assert ids.tolist() == [[1, 2], [3, 4]]


def test_int64_is_not_copied_and_nothing_is_an_empty_list():
    given = np.array([3, 1])
    assert np.shares_memory(require_ids("ids", given, FIXED), given)
    assert (
        require_ids("ids", [], FIXED).tolist() == require_ids("ids", torch.empty(0, dtype=torch.long), FIXED).tolist()
    )


def test_a_growing_table_takes_every_int64():
    ids = [-(2**63), -1, 0, LARGEST]
    assert require_ids("ids", ids, GROWING).tolist() == ids
    assert require_ids("ids", np.array([LARGEST], np.uint64), GROWING).tolist() == [LARGEST]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([0, 3, -1], r"row_ids: id -1 at position 2 cannot be used: .* has the ids 0 to 9"),
        ([[0, 3], [10, -1]], r"id 10 at position \(1, 0\)"),
        (7 + np.arange(5), "id 10 at position 3"),
        ([0.0], "must be integers of at most 64 bits, not numpy's float64"),
        ([], None),
        (torch.tensor([1.0]), "must be integers, not torch's float32"),
        (torch.tensor([True]), "not torch's bool"),
        ([True], "not numpy's bool"),
        (["a"], "must be integers"),
        ([2**64], "must be integers"),
        ([[1], [2, 3]], "row_ids must be an array of integers"),
        (np.zeros(0), "not numpy's float64"),
    ],
)
def test_what_is_no_id_of_the_table_is_refused(given, message):
    if message is None:
        assert require_ids("row_ids", given, FIXED).shape == (0,)
        return
    with pytest.raises(UsageError, match=message):
        require_ids("row_ids", given, FIXED)


def test_a_hash_of_64_bits_without_sign_says_how_to_pass_it():
    with pytest.raises(UsageError, match=rf"id {2**63} at position 1 .*view\('int64'\)"):
        require_ids("ids", np.array([1, 2**63], np.uint64), GROWING)


def test_the_hash_is_splitmix64s():
    # The first numbers of splitmix64 that begins with 0: its state grows by the constant that ``mixed`` adds.
    assert mixed(np.array([0, 0x9E3779B97F4A7C15 - 2**64])).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_stripes_of_a_fixed_table_are_remainders_and_those_of_a_growing_one_are_even():
    assert stripes_of(FIXED, np.arange(7), 3).tolist() == [0, 1, 2, 0, 1, 2, 0]
    counts = np.bincount(stripes_of(GROWING, np.arange(0, 1 << 20, 64), 4), minlength=4)
    assert counts.min() > 0.24 * (1 << 14)
