"""The tables of metrics: names that Prometheus' users expect."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from job_views import server_report, worker_report

from kvstore.observing.figures import ServerFigures, WorkerFigures
from kvstore.observing.quantities import OF_SERVERS, OF_WORKERS, Quantity, Series
from kvstore.observing.view import Span


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


def test_every_figure_that_a_table_names_is_one() -> None:
    for table, figures in (
        (OF_WORKERS, WorkerFigures.of(Span(worker_report(), worker_report()))),
        (OF_SERVERS, ServerFigures.of(Span(server_report(), server_report()))),
    ):
        named = {each.figure for each in table if each.figure}
        assert named == set(vars(figures)) - {"links", "values"}


def test_every_report_has_every_number() -> None:
    for series in series_of(OF_WORKERS):
        assert series.read(worker_report()) is not None, series.name
    for series in series_of(OF_SERVERS):
        assert series.read(server_report()) is not None, series.name


def test_microseconds_become_seconds() -> None:
    numbers = {series.name: series.read(server_report(busy_us=1_250_000)) for series in series_of(OF_SERVERS)}
    assert numbers["server_busy_seconds"] == 1.25
