from __future__ import annotations

import pytest

from kvstore.transport.memory import Heap
from servers.store.rounds import Rounds
from servers.store.target import Bucket, HeldSegments
from servers.store.updates import LEAST_BYTES, MOST_BYTES, ROUNDS, HandOver, interval

LARGE = LEAST_BYTES


def bucket() -> Bucket:
    return Bucket(HeldSegments([], [], [], []), "float32", Rounds([0]), Heap())


@pytest.mark.parametrize(
    ("random", "shares", "round_bytes", "store_bytes", "every"),
    [
        (False, True, LARGE, LARGE, ROUNDS),
        (False, True, LARGE, MOST_BYTES // ROUNDS, ROUNDS),
        (False, True, LARGE, MOST_BYTES // 2, 2),
        (False, True, LARGE, MOST_BYTES // 2 + 1, 0),
        (False, True, LARGE - 1, LARGE, 0),
        (False, False, LARGE, LARGE, 0),
        (True, False, 4, MOST_BYTES, 1),
    ],
)
def test_after_how_many_rounds(random: bool, shares: bool, round_bytes: int, store_bytes: int, every: int) -> None:
    assert interval(random, shares, round_bytes, store_bytes) == every


def test_arrays_are_handed_over_once_so_many_rounds_are_kept() -> None:
    hand_over, one, other = HandOver(), bucket(), bucket()
    for _ in range(3):
        assert hand_over.keeps([one], 2)
        assert not hand_over.due([one], 2)
        assert hand_over.keeps([one, other], 2)
        assert hand_over.due([one, other], 2)
    assert hand_over.keeps([other], 2)
    assert not hand_over.due([other], 2)
    assert not hand_over.keeps([other], 0)
    assert not hand_over.due([other], 0)


def test_after_an_update_that_has_failed_the_standby_makes_the_next_ones_before_it_keeps_any() -> None:
    hand_over, one = HandOver(), bucket()
    assert hand_over.keeps([one], 2)
    hand_over.fail()
    assert not hand_over.keeps([one], 2)
    assert hand_over.keeps([one], 2)
