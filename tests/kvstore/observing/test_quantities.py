from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.observing import quantities as q


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1.0, "0.0 s"), (0.44, "0.4 s"), (12.9, "12 s"), (192, "3 min 12 s"), (7500, "2 h 5 min"), (273600, "3 d 4 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert q.duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1234567, "1.2 MB"),
        (999_600, "1.0 MB"),
        (245e6, "245 MB"),
        (3e15, "3.0 PB"),
    ],
)
def test_bytes(count: float, text: str) -> None:
    assert q.nbytes(count) == text


@pytest.mark.parametrize(("number", "text"), [(0.123, "0.12"), (12.34, "12.3"), (123.4, "123"), (math.nan, "-")])
def test_rates(number: float, text: str) -> None:
    assert q.rate(number) == text


def test_shares_and_counts() -> None:
    assert (q.share(0.984), q.count(12.0)) == ("98 %", "12")


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([1, 0], "0, 1"), ([0, 2, *range(4, 64)], "0, 2, 4-63"), ([5, 5], "5")]
)
def test_ranks(ranks: list[int], text: str) -> None:
    assert q.ranks(ranks) == text


@given(st.sets(st.integers(0, 200)))
def test_no_rank_is_lost(ranks: set[int]) -> None:
    read: set[int] = set()
    for part in filter(None, q.ranks(ranks).split(", ")):
        first, _, last = part.partition("-")
        read.update(range(int(first), int(last or first) + 1))
    assert read == ranks


def test_members() -> None:
    assert (q.members("worker", [3]), q.members("server", [1, 0])) == ("worker 3", "servers 0, 1")
