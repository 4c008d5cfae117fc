from __future__ import annotations

import pytest
from asking import Worker
from hosting import describe

from kvstore.errors import KeyNotInitialized, Mismatch, UsageError
from servers.aggregator.gathering import MOST_LISTS, HostSegments

KNOWN = {1: ("a", 0, 3), 2: ("b", 0, 5), 3: ("c", 1, 7)}


def known() -> HostSegments:
    segments = HostSegments()
    segments.add(describe(Worker(0), KNOWN))
    return segments


def test_a_list_knows_its_server_and_sizes():
    listed = known().listed([2, 1])
    assert (listed.server, listed.dtype, listed.sizes, listed.size, listed.nbytes) == (0, "float32", [5, 3], 8, 32)
    assert list(listed.keys) == ["b", "a"]


def test_the_same_list_is_the_same_object_and_knows_lists_that_share_segments():
    segments = known()
    first, second, third = segments.listed([1, 2]), segments.listed([2]), segments.listed([3])
    assert segments.listed([1, 2]) is first
    assert (first.others, second.others, third.others) == ({second}, {first}, set())


def test_all_workers_tell_the_same():
    segments = known()
    segments.add(describe(Worker(1), KNOWN))
    with pytest.raises(Mismatch, match="worker 1 and another worker of this host describe 'a' differently"):
        segments.add(describe(Worker(1), {4: ("d", 0, 1), 1: ("a", 0, 4)}))
    assert len(segments) == 3


def test_a_segment_that_nobody_has_described_is_refused():
    with pytest.raises(KeyNotInitialized, match="segment 9"):
        known().listed([1, 9])


def test_a_list_is_of_one_server():
    with pytest.raises(UsageError, match="one server and one dtype"):
        known().listed([1, 3])


def test_key_and_size_of_a_segment():
    assert (known().key(2), known().size(2)) == ("b", 5)


def test_lists_are_forgotten_when_there_are_very_many_and_not_while_they_are_busy():
    segments = HostSegments()
    segments.add(describe(Worker(0), {number: (f"k{number}", 0, 1) for number in range(MOST_LISTS + 2)}))
    kept = segments.listed([0, 1])
    for number in range(MOST_LISTS + 1):
        segments.listed([number])
    segments.forget({kept})
    assert segments.listed([0, 1]) is kept
    assert not kept.others
    assert segments.listed([1]).others == {kept}
