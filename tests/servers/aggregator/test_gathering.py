"""Groups of pushes: complete when nobody's can come any more, whatever lists workers push."""

from __future__ import annotations

import random

import pytest
from asking import Worker
from hosting import describe
from hypothesis import given
from hypothesis import strategies as st

from kvstore import wire
from kvstore.errors import KeyNotInitialized, Mismatch, UsageError
from servers.aggregator.gathering import MOST_LISTS, Gathering, Group, HostSegments, Pushed

SEGMENTS = {number: (f"k{number}", 0, 1) for number in range(4)}


class Pushing:
    def __init__(self, workers: int = 2) -> None:
        self.segments = HostSegments()
        self.segments.add(describe(Worker(0), SEGMENTS))
        self.gathering = Gathering(range(workers), self.segments)
        self.clocks = [dict.fromkeys(SEGMENTS, 0) for _ in range(workers)]
        self._workers = [Worker(rank) for rank in range(workers)]

    def push(self, rank: int, *ids: int) -> list[tuple[tuple[int, ...], list[int]]]:
        """The groups that a push completes: their segments and the ranks in them."""
        clocks = self.clocks[rank]
        for number in ids:
            clocks[number] += 1
        message = wire.Push(
            self._workers[rank].me(), 0, list(ids), [clocks[number] for number in ids], True, None, None
        )
        return said(self.gathering.add(self.segments.listed(ids), rank, Pushed(b"", message), 0.0))


def said(groups: list[Group]) -> list[tuple[tuple[int, ...], list[int]]]:
    return [(group.listed.ids, sorted(group.pushes)) for group in groups]


def test_a_group_is_complete_when_all_have_pushed_it():
    pushing = Pushing()
    assert pushing.push(1, 0, 1) == []
    assert pushing.push(1, 0, 1) == []
    assert pushing.push(0, 0, 1) == [((0, 1), [0, 1])]
    assert pushing.push(0, 0, 1) == [((0, 1), [0, 1])]
    assert len(pushing.gathering) == 0


def test_different_clocks_of_one_list_are_different_groups():
    pushing = Pushing()
    pushing.push(0, 0)
    pushing.push(1, 0)
    assert pushing.push(0, 0, 1) == []
    assert pushing.push(1, 0, 1) == [((0, 1), [0, 1])]


def test_workers_with_other_lists_hold_nobody_up():
    pushing = Pushing()
    assert pushing.push(0, 0, 1) == []
    assert pushing.push(1, 0) == [((0,), [1]), ((0, 1), [0])]
    assert pushing.push(1, 1) == [((1,), [1])]
    assert len(pushing.gathering) == 0


def test_a_later_push_of_another_list_is_no_sign_that_an_earlier_one_will_not_come():
    pushing = Pushing()
    pushing.push(0, 0, 1)
    assert pushing.push(0, 0) == []  # worker 0 is ahead; worker 1 may still push both
    assert pushing.push(1, 0, 1) == [((0, 1), [0, 1])]
    assert pushing.push(1, 0) == [((0,), [0, 1])]


def test_a_worker_that_has_joined_is_waited_for_up_to_its_last_push():
    pushing = Pushing()
    pushing.push(0, 0)
    assert said(pushing.gathering.pause(1, {0: 1, 1: 0})) == []
    pushing.push(0, 1)
    assert said(pushing.gathering.pause(1, {0: 1, 1: 0})) == []
    assert len(pushing.gathering) == 1  # segment 0, which worker 1 has pushed once: it is on its way


def test_what_waits_for_a_worker_goes_on_when_it_joins_or_leaves():
    pushing = Pushing(3)
    pushing.push(0, 0)
    pushing.push(1, 1)
    assert said(pushing.gathering.pause(2, dict.fromkeys(SEGMENTS, 0))) == []
    assert said(pushing.gathering.depart([1])) == [((0,), [0])]
    assert pushing.push(0, 1) == [((1,), [0, 1])]


def test_after_a_join_everybody_is_waited_for_again():
    pushing = Pushing()
    pushing.push(0, 0)
    assert said(pushing.gathering.pause(1, dict.fromkeys(SEGMENTS, 0))) == [((0,), [0])]
    pushing.clocks[1][0] = 1  # as ``Resume`` tells
    assert pushing.push(1, 0) == []
    assert pushing.push(0, 0) == [((0,), [0, 1])]


def test_those_who_are_missing_are_known():
    pushing = Pushing(3)
    pushing.push(1, 0)
    (group,) = pushing.gathering.groups()
    assert pushing.gathering.missing(group) == [0, 2]


@given(st.integers(0, 10**6), st.integers(1, 4))
def test_every_push_goes_on_once_and_nothing_waits_when_all_have_pushed(seed: int, workers: int):
    dice = random.Random(seed)
    pushing = Pushing(workers)
    programs = []
    for _ in range(workers):  # each pushes every segment three times, in lists of its own
        lists: list[tuple[int, ...]] = []
        for _ in range(3):
            ids = dice.sample(sorted(SEGMENTS), len(SEGMENTS))
            at = dice.randint(0, len(ids))
            lists += [part for part in (tuple(ids[:at]), tuple(ids[at:])) if part]
        programs.append(lists)
    if dice.random() < 0.5:
        programs = [programs[0]] * workers
    gone: list[tuple[int, int, int]] = []
    clocks = [dict.fromkeys(SEGMENTS, 0) for _ in range(workers)]
    left = {rank: list(lists) for rank, lists in enumerate(programs)}
    groups: list[tuple[tuple[int, ...], list[int]]] = []
    while any(left.values()):
        rank = dice.choice([rank for rank, lists in left.items() if lists])
        groups += pushing.push(rank, *left[rank].pop(0))
    for ids, ranks in groups:
        for rank in ranks:
            for number in ids:
                clocks[rank][number] += 1
                gone.append((rank, number, clocks[rank][number]))
    assert len(set(gone)) == len(gone)
    assert clocks == [dict.fromkeys(SEGMENTS, 3)] * workers
    assert len(pushing.gathering) == 0
    if all(lists == programs[0] for lists in programs):
        assert all(ranks == list(range(workers)) for _, ranks in groups)


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
