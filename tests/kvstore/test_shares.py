"""Samples that workers take as they are ready: each is used once, whoever dies."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import Mismatch
from kvstore.shares import KEPT, Share, Shares


def take(shares: Shares, rank: int, most: int = 3, epoch: int = 0, used: int = 0, size: int = 10) -> list[int]:
    share = shares.take(rank, "train", epoch, size, most, used, 0)
    assert not share.over
    return list(range(share.start, share.stop))


def over(shares: Shares, rank: int, passes: int = 1, epoch: int = 0) -> bool:
    return shares.take(rank, "train", epoch, 10, 0, 0, passes).over


def test_whoever_asks_gets_the_next_ones() -> None:
    shares = Shares()
    assert [take(shares, 0), take(shares, 1, 5), take(shares, 0)] == [[0, 1, 2], [3, 4, 5, 6, 7], [8, 9]]
    assert take(shares, 1) == [] == take(shares, 0)
    assert over(shares, 0)
    assert over(shares, 1)


def test_what_a_lost_worker_has_not_used_goes_to_others_first() -> None:
    shares = Shares()
    take(shares, 0)
    assert take(shares, 0) == [3, 4, 5]
    take(shares, 0, 2, used=4)
    shares.lose(0)
    assert [take(shares, 1, 1), take(shares, 1), take(shares, 1), take(shares, 1)] == [[4], [5], [6, 7], [8, 9]]
    assert over(shares, 1)


def test_one_that_comes_back_has_used_nothing_of_what_it_takes_now() -> None:
    shares = Shares()
    take(shares, 0, 5)
    take(shares, 0, 1, used=5)
    shares.lose(0)
    assert take(shares, 0) == [5]
    assert take(shares, 0, used=1) == [6, 7, 8]
    shares.lose(0)
    assert take(shares, 1) == [6, 7, 8], "5 was used, and 6 was not"


def test_all_hear_the_same_of_the_end_of_an_epoch() -> None:
    shares = Shares()
    take(shares, 0, 4)
    take(shares, 1, 6)
    shares.lose(1)
    assert not over(shares, 0), "what worker 1 had is left"
    assert take(shares, 0, 6) == [4, 5, 6, 7, 8, 9]
    assert not over(shares, 2), "it joined as often as worker 0, and goes on with it"
    assert over(shares, 0, 2)
    assert over(shares, 2, 2)
    assert take(shares, 1) == []
    assert over(shares, 1, 2)


def test_who_is_in_a_later_epoch_has_used_all_of_the_earlier_ones() -> None:
    shares = Shares()
    take(shares, 0, 10)
    take(shares, 0, 2, epoch=1)
    shares.lose(0)
    assert take(shares, 1) == [], "used"
    assert take(shares, 1, epoch=1) == [0, 1]
    take(shares, 1, epoch=2)
    assert shares.take(0, "train", 0, 10, 3, 0, 0) == Share(0, 0, True), f"{KEPT} epochs are kept"
    assert take(shares, 0, epoch=1) == [2, 3, 4]


def test_data_sets_are_apart_and_have_one_size() -> None:
    shares = Shares()
    take(shares, 0)
    assert shares.take(0, "other", 0, 7, 9, 0, 0) == Share(0, 7)
    with pytest.raises(Mismatch, match="data set 'train' has 11 samples on worker 1, and 10 on another"):
        take(shares, 1, size=11)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.booleans()), max_size=60), st.integers(1, 25))
def test_each_sample_is_used_once_by_those_that_live(moves: list[tuple[int, int, bool]], size: int) -> None:
    shares, counts = Shares(), Counter[int]()
    holding: dict[int, list[int]] = {0: [], 1: [], 2: []}
    used = dict.fromkeys(holding, 0)

    def go(rank: int, most: int) -> bool:
        counts.update(holding[rank])
        used[rank] += len(holding[rank])
        holding[rank] = take(shares, rank, most, used=used[rank], size=size)
        return bool(holding[rank])

    for rank, most, dies in moves:
        go(rank, most)
        if dies:
            shares.lose(rank)
            holding[rank], used[rank] = [], 0
    for rank in holding:
        while go(rank, 3):
            pass
    assert counts == Counter(range(size))
