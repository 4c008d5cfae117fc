"""How parameters are divided into buckets, and which buckets may go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.common import buckets
from workers.common.buckets import Progress, divide

MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([1], [range(1)]),
        ([1, 2, 3], [range(3)]),
        ([5, MIB], [range(1, 2), range(1)]),
        ([MIB, 5], [range(2)]),
        ([4 * MIB, 4 * MIB, 4 * MIB, MIB - 1, 1], [range(3, 5), range(1, 3), range(1)]),
        ([100 * MIB, 1, 100 * MIB, 1], [range(2, 4), range(2)]),
        ([0, 0], [range(2)]),
    ],
)
def test_the_last_parameters_go_first_and_early(sizes: list[int], expected: list[range]) -> None:
    assert divide(sizes) == expected


def test_small_buckets_are_all_as_small_as_the_first() -> None:
    sizes = [4 * MIB, MIB, MIB - 1, 1, MIB - 1, 1]
    assert divide(sizes) == [range(4, 6), range(4)]
    assert divide(sizes, small=True) == [range(4, 6), range(2, 4), range(1, 2), range(1)]


@given(st.lists(st.integers(0, 9 * MIB), min_size=1, max_size=40))
def test_every_parameter_is_in_one_bucket(sizes: list[int]) -> None:
    divided = divide(sizes)
    assert [position for bucket in reversed(divided) for position in bucket] == list(range(len(sizes)))
    limits = [buckets.FIRST_BYTES] + [buckets.BUCKET_BYTES] * len(divided)
    for bucket, limit in zip(divided, limits, strict=False):
        assert sum(sizes[bucket.start + 1 : bucket.stop]) < limit, "full without its last one"
    for bucket, limit in zip(divided[:-1], limits, strict=False):
        assert sum(sizes[position] for position in bucket) >= limit


def test_a_bucket_goes_with_its_last_gradient() -> None:
    progress = Progress([range(2, 4), range(2)])
    assert progress.num_buckets == 2
    assert [progress.arrive(position) for position in (2, 3, 1)] == [[], [range(2, 4)], []]
    assert [progress.gone(position) for position in range(4)] == [False, False, True, True]
    assert not progress.complete
    assert progress.arrive(0) == [range(2)]
    assert progress.complete


def test_buckets_go_in_order() -> None:
    progress = Progress([range(2, 3), range(1, 2), range(1)])
    assert progress.arrive(1) == []
    assert progress.arrive(1) == [], "again"
    assert progress.arrive(2) == [range(2, 3), range(1, 2)]
    assert progress.arrive(2) == [], "it has gone"


def test_a_new_step_begins_at_the_first_bucket() -> None:
    progress = Progress([range(1, 2), range(1)])
    progress.arrive(1)
    progress.restart()
    assert not progress.gone(1)
    assert progress.arrive(0) == []
