from __future__ import annotations

import pytest
from viewed_job import server, view_of, worker

from kvstore.observing.figures import ServerFigures, WorkerFigures, job_rounds_per_s


def test_rates_and_shares_are_over_the_time_between_two_reports() -> None:
    member = worker(
        0,
        before={"rounds": 10, "blocked_us": 0, "input_us": 0, "sent": [0, 100], "received": [0, 0]},
        rounds=50,
        blocked_us=5_000_000,
        input_us=1_000_000,
        cpu_us=15_000_000,
        sent=[1000, 300],
        received=[500, 0],
        values=[["loss", 0.5]],
        ahead=2,
    )
    assert member.worker is not None
    its = WorkerFigures.of(member.worker)
    assert (its.rounds, its.rounds_per_s, its.waits, its.input, its.cores) == (50, 4.0, 0.5, 0.1, 1.5)
    assert (its.sent_per_s, its.received_per_s, its.links) == (120.0, 50.0, ((100.0, 50.0), (20.0, 0.0)))
    assert (its.ahead, its.values) == (2, {"loss": 0.5})


def test_with_one_report_there_are_no_rates() -> None:
    member = worker(0, rounds=3, input_us=5)
    assert member.worker is not None
    its = WorkerFigures.of(member.worker)
    assert (its.rounds, its.rounds_per_s, its.waits, its.input, its.sent_per_s, its.links) == (3, *[None] * 4, ())


def test_input_is_unknown_where_nobody_says() -> None:
    member = worker(0, before={}, input_us=-1)
    assert member.worker is not None
    assert WorkerFigures.of(member.worker).input is None


def test_a_link_that_is_new_has_been_at_0() -> None:
    member = worker(0, before={"sent": [], "received": []}, sent=[10], received=[20])
    assert member.worker is not None
    assert WorkerFigures.of(member.worker).links == ((1.0, 2.0),)


def test_a_servers_figures() -> None:
    member = server(0, before={"rounds": 0}, busy_us=9_000_000, sent=1000, received=2000)
    assert member.server is not None
    its = ServerFigures.of(member.server)
    assert (its.rounds_per_s, its.busy, its.sent_per_s, its.received_per_s, its.held) == (5.0, 0.9, 100.0, 200.0, 4000)


def test_the_job_does_as_many_rounds_as_the_worker_in_the_middle() -> None:
    workers = [worker(rank, before={"rounds": 50 - done}) for rank, done in enumerate((10, 20, 90))]
    assert job_rounds_per_s(view_of(workers)) == pytest.approx(2.0)
    assert job_rounds_per_s(view_of([worker(0)])) is None
    assert job_rounds_per_s(view_of([worker(0, "lost", before={"rounds": 0})])) is None
