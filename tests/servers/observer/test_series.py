"""The tables of metrics: names that Prometheus' users expect."""

from __future__ import annotations

from job_views import server_report, worker_report

from servers.observer.metrics import OF_MEMBERS, OF_SERVERS, OF_WORKERS, PREFIX

EVERY = (*OF_MEMBERS, *OF_WORKERS, *OF_SERVERS)


def test_a_name_is_there_once() -> None:
    names = [series.name for series in EVERY]
    assert len(names) == len(set(names))


def test_times_and_sizes_are_in_base_units_which_their_names_end_in() -> None:
    for series in EVERY:
        assert series.name.endswith("_seconds") == ("econds" in series.meaning or "time" in series.meaning)
        assert series.name.endswith("_bytes") == ("ytes" in series.meaning)


def test_a_family_has_the_prefix_and_no_numbers() -> None:
    family = OF_WORKERS[0].family()
    assert (family.name, family.kind, family.samples) == (PREFIX + OF_WORKERS[0].name, OF_WORKERS[0].kind, [])


def test_every_report_has_every_number() -> None:
    for series in (*OF_MEMBERS, *OF_WORKERS):
        assert series.read(worker_report()) is not None, series.name
    for series in (*OF_MEMBERS, *OF_SERVERS):
        assert series.read(server_report()) is not None, series.name


def test_microseconds_become_seconds() -> None:
    numbers = {series.name: series.read(server_report(busy_us=1_250_000)) for series in OF_SERVERS}
    assert numbers["server_busy_seconds"] == 1.25
