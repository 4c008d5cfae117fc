"""Views of jobs that never ran, for tests of what observers make of a view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvstore import wire
from kvstore.observing.view import JobView, MemberView, Span


def worker_report(servers: int = 2, **changes: Any) -> wire.WorkerReport:
    report = wire.WorkerReport(
        wire.Node("worker", 0, 1),
        at=100.0,
        rounds=7,
        blocked_us=2_500_000,
        input_us=500_000,
        cpu_us=4_000_000,
        memory=1 << 30,
        outstanding=3,
        ahead=1,
        sent=[1000 + server for server in range(servers)],
        received=[2000 + server for server in range(servers)],
        values=[["loss", 0.25]],
    )
    return replace(report, **changes)


def server_report(workers: int = 2, **changes: Any) -> wire.ServerReport:
    report = wire.ServerReport(
        wire.Node("server", 0, 1),
        at=100.0,
        rounds=7,
        busy_us=1_500_000,
        cpu_us=2_000_000,
        memory=1 << 29,
        held=4096,
        received=5000,
        sent=6000,
        waves=6,
        came_last=[5] + [1] * (workers - 1),
        alone_us=[3_000_000] + [0] * (workers - 1),
        waiting=[1],
        missing=[0],
        oldest_us=250_000,
    )
    return replace(report, **changes)


def member(
    role: str, rank: int, report: wire.WorkerReport | wire.ServerReport | None = None, **changes: Any
) -> MemberView:
    of_worker = Span(report, report) if isinstance(report, wire.WorkerReport) else None
    of_server = Span(report, report) if isinstance(report, wire.ServerReport) else None
    return replace(MemberView(role, rank, 1, "ready", 0.5, "", of_worker, of_server), **changes)


def job_view(
    workers: int = 2, servers: int = 2, members: Sequence[MemberView] | None = None, **changes: Any
) -> JobView:
    """A view of a job in which all is well; with ``members``, those it has instead of all."""
    every = [
        *(member("worker", rank, worker_report(servers)) for rank in range(workers)),
        *(member("server", rank, server_report(workers)) for rank in range(servers)),
    ]
    view = JobView(
        at=100.0,
        started=40.0,
        num_workers=workers,
        num_servers=servers,
        num_standbys=0,
        num_aggregators=0,
        members=every if members is None else members,
        failure=None,
        waits="",
        events=[],
    )
    return replace(view, **changes)
