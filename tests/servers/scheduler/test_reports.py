"""What members report: which reports are kept, and whose."""

from __future__ import annotations

from dataclasses import replace

from made_reports import server_report, worker_report
from rendezvous import Job

from kvstore import wire
from servers.scheduler.straggling import Reports


def test_of_each_member_the_latest_report_and_one_of_some_seconds_ago():
    reports = Reports()
    for second in range(30):
        reports.take(worker_report(rank=1, rounds=second), 100.0 + second)
        reports.take(server_report(rank=1, rounds=2 * second), 100.0 + second)
    before, latest = reports.of(wire.Node("worker", 1, 1))
    assert (before.rounds, latest.rounds) == (23, 29)
    before, latest = reports.of(wire.Node("server", 1, 1))
    assert (before.rounds, latest.rounds) == (46, 58)


def test_one_report_is_one_and_another_process_begins_anew():
    reports = Reports()
    assert reports.of(wire.Node("worker", 0, 1)) == ()
    first = worker_report(rank=0)
    reports.take(first, 1.0)
    assert reports.of(wire.Node("worker", 0, 1)) == (first,)
    successor = replace(first, node=wire.Node("worker", 0, 2))
    reports.take(successor, 2.0)
    assert reports.of(wire.Node("worker", 0, 1)) == ()
    assert reports.of(wire.Node("worker", 0, 2)) == (successor,)


def test_many_reports_take_the_memory_of_few():
    reports = Reports()
    for beat in range(10_000):
        reports.take(worker_report(rank=0, rounds=beat), beat / 100)
    assert reports.kept == 7 + 4
    assert [report.rounds for report in reports.of(wire.Node("worker", 0, 1))] == [9300, 9999]


def test_a_member_is_believed_over_the_link_of_its_beats_alone():
    job = Job()
    w0, w1, s0 = job.everyone
    honest = worker_report(rank=0, rounds=5)
    assert job.handle(w0.beats, honest) == []
    assert job.scheduler.observing.reports.of(w0.node) == (honest,)
    forged = worker_report(rank=1, rounds=5)
    for link in (w0.beats, b"a stranger"):
        assert job.handle(link, forged) == []
    assert job.handle(w1.beats, replace(forged, node=wire.Node("worker", 1, 9))) == []
    assert job.handle(s0.beats, worker_report(role="server", rank=0)) == [], "a worker's report of a server"
    assert job.handle(w1.beats, server_report(role="worker", rank=1)) == []
    assert job.scheduler.observing.reports.of(w1.node) == job.scheduler.observing.reports.of(s0.node) == ()


def test_slow_rounds_are_compared_over_longer_times():
    reports = Reports()
    for second in range(301):
        reports.take(worker_report(rank=0, at=second, rounds=second // 10), float(second))
        reports.take(server_report(rank=0, at=second, rounds=9, waves=second // 10), float(second))
    for node in (wire.Node("worker", 0, 1), wire.Node("server", 0, 1)):
        assert [report.at for report in reports.over(node, 3.0) or ()] == [297, 300]
        assert [report.at for report in reports.over(node, 3.0, fewest=20) or ()] == [90, 300]
        assert [report.at for report in reports.over(node, 3.0, fewest=1000) or ()] == [0, 300]
    assert reports.over(wire.Node("worker", 1, 1), 3.0) is None
    for second in range(301, 2000):
        reports.take(worker_report(rank=0, at=second), float(second))
    assert [report.at for report in reports.over(wire.Node("worker", 0, 1), 3.0, fewest=1) or ()] == [1410, 1999]
