"""The tables of metrics: names that Prometheus' users expect."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_views import server_report, worker_report

from kvstore.observing import quantities as q
from kvstore.observing.quantities import OF_SERVERS, OF_WORKERS, Quantity, Series


def series_of(table: Iterable[Quantity[Any]]) -> list[Series[Any]]:
    return [each.series for each in table if each.series is not None]


EVERY = series_of(dict.fromkeys((*OF_WORKERS, *OF_SERVERS)))


def test_a_name_is_there_once() -> None:
    names = [series.name for series in EVERY]
    assert len(names) == len(set(names))


def test_times_and_sizes_are_in_base_units_which_their_names_end_in() -> None:
    for series in EVERY:
        assert series.name.endswith("_seconds") == ("econds" in series.meaning or "time" in series.meaning)
        assert series.name.endswith("_bytes") == ("ytes" in series.meaning)


def test_every_report_has_every_number() -> None:
    for series in series_of(OF_WORKERS):
        assert series.read(worker_report()) is not None, series.name
    for series in series_of(OF_SERVERS):
        assert series.read(server_report()) is not None, series.name


def test_microseconds_become_seconds() -> None:
    numbers = {series.name: series.read(server_report(busy_us=1_250_000)) for series in series_of(OF_SERVERS)}
    assert numbers["server_busy_seconds"] == 1.25


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
