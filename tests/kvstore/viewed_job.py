"""Views of jobs for tests: few members, whose reports the test writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kvstore import wire
from kvstore.job.place import ObservingPlace
from kvstore.observing.view import Event, JobView, MemberView, Span

PLACE = ObservingPlace(
    "ipc:///j/scheduler", job="j", command="python train.py", launcher="local", pid=42, workers=3, servers=2
)


def worker(rank: int, state: str = "ready", *, before: dict[str, Any] | None = None, **latest: Any) -> MemberView:
    """A worker with a report; with ``before``, one of ten seconds before it, too."""
    report = wire.WorkerReport(wire.Node("worker", rank, 1), 100.0, 50, 0, -1, 0, 10**8, 0, 0, [0, 0], [0, 0])
    now = dataclasses.replace(report, **latest)
    then = now if before is None else dataclasses.replace(report, at=90.0, **before)
    return MemberView("worker", rank, 1, state, 0.4, "", Span(then, now))


def server(rank: int, role: str = "server", *, before: dict[str, Any] | None = None, **latest: Any) -> MemberView:
    report = wire.ServerReport(wire.Node(role, rank, 1), 100.0, 50, 0, 0, 10**8, 4000, 0, 0, 0, [], [], [], [], 0)
    now = dataclasses.replace(report, **latest)
    then = now if before is None else dataclasses.replace(report, at=90.0, **before)
    return MemberView(role, rank, 1, "ready", 0.4, "", server=Span(then, now))


def view_of(members: Sequence[MemberView], **more: Any) -> JobView:
    counts = [sum(member.role == role for member in members) for role in ("worker", "server", "standby", "aggregator")]
    view = JobView(100.0, 40.0, *counts, members, None, "", [Event(1, 41.0, "all have joined")])
    return dataclasses.replace(view, **more)
