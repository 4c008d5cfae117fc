"""How a job is at one moment, as an observer is told: its members, and what they report. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from kvstore import wire
from kvstore.errors import WireError
from kvstore.job.contract import member_name, member_title

AnyReport: TypeAlias = wire.WorkerReport | wire.ServerReport
R = TypeVar("R", wire.WorkerReport, wire.ServerReport)


@dataclass(frozen=True)
class Span(Generic[R]):
    """Two reports of one member: one of some six seconds ago, and the latest; twice the same if there is only one."""

    before: R
    latest: R

    @property
    def seconds(self) -> float:
        return max(0.0, self.latest.at - self.before.at)

    def rate(self, count: str) -> float:
        """Return by how much the attribute ``count`` has grown in a second; 0 for one report."""
        grown: float = getattr(self.latest, count) - getattr(self.before, count)
        return grown / self.seconds if self.seconds > 0 else 0.0

    def grown(self, counts: str) -> list[int]:
        """Return by how much each of the list ``counts`` has grown; one that was not there before has been 0."""
        # Lists grow while a job runs: a worker makes its first link to a server, a server first hears of a worker. When
        # its aggregator is lost, a worker counts what it sends to each server, from 0 on.
        before, latest = getattr(self.before, counts), getattr(self.latest, counts)
        pairs = itertools.zip_longest(latest, before[: len(latest)], fillvalue=0)
        return [now - then if now >= then else now for now, then in pairs]


@dataclass(frozen=True)
class MemberView:
    """A member that has joined.

    Attributes:
        role, rank, incarnation: of its process; rank -1 before all have joined.
        state: ``joined``, ``ready``, ``left`` or ``lost``.
        silent_s: the seconds since its last sign of life.
        address: where others reach it; empty for workers.
        worker: its reports, if it is a worker that has made any.
        server: its reports, if it is a server, a standby or an aggregator that has made any.
        host, pid: where its process runs; empty and 0 if it has not said so. In a container both are the container's.
    """

    role: str
    rank: int
    incarnation: int
    state: str
    silent_s: float
    address: str
    worker: Span[wire.WorkerReport] | None = None
    server: Span[wire.ServerReport] | None = None
    host: str = ""
    pid: int = 0

    @property
    def name(self) -> str:
        """In tables: ``worker 1``."""
        return member_name(self.role, self.rank)

    @property
    def title(self) -> str:
        """In sentences: ``worker 1``, ``the standby of server 1``."""
        return member_title(self.role, self.rank)


@dataclass(frozen=True)
class Event:
    """Something that has happened; numbers grow from event to event, ``at`` is by the scheduler's monotonic clock."""

    number: int
    at: float
    text: str


@dataclass(frozen=True)
class JobView:
    """A job at one moment; see ``Observed`` for the attributes.

    Attributes:
        num_workers, num_servers, num_standbys, num_aggregators: how many members the job has.
    """

    at: float
    started: float
    num_workers: int
    num_servers: int
    num_standbys: int
    num_aggregators: int
    members: Sequence[MemberView]
    failure: str | None
    waits: str
    events: Sequence[Event]
    awaited: Sequence[int] = ()

    @classmethod
    def of(cls, observed: wire.Observed) -> JobView:
        reports: dict[int, list[AnyReport]] = {}
        for owner, frame in zip(observed.owners, observed.buffers, strict=False):
            report = wire.decode([frame])
            if not isinstance(report, wire.WorkerReport | wire.ServerReport) or owner >= len(observed.members):
                raise WireError(f"expected reports of {len(observed.members)} members, got one of member {owner}")
            reports.setdefault(owner, []).append(report)
        if len(observed.owners) != len(observed.buffers) or len(observed.expected) != 4:
            raise WireError("expected a member for each report, and how many members of four roles there are")
        members = [_member(record, reports.get(place, ())) for place, record in enumerate(observed.members)]
        events = [Event(number, at, text) for number, (at, text) in enumerate(observed.events, observed.first_event)]
        workers, servers, standbys, aggregators = observed.expected
        return cls(
            observed.at,
            observed.started,
            workers,
            servers,
            standbys,
            aggregators,
            members,
            observed.failure,
            observed.waits,
            events,
            observed.awaited,
        )

    def of_role(self, role: str) -> list[MemberView]:
        """By rank."""
        return sorted((member for member in self.members if member.role == role), key=lambda member: member.rank)


def _member(record: Sequence[Any], reports: Sequence[AnyReport]) -> MemberView:
    role, rank, incarnation, state, silent_s, address, host, pid = record
    of_worker = [report for report in reports if isinstance(report, wire.WorkerReport)]
    of_server = [report for report in reports if isinstance(report, wire.ServerReport)]
    if len(of_server if role == "worker" else of_worker):
        raise WireError(f"{member_title(role, rank)} has a report that members of its role do not make")
    worker = Span(of_worker[0], of_worker[-1]) if of_worker else None
    server = Span(of_server[0], of_server[-1]) if of_server else None
    return MemberView(role, rank, incarnation, state, silent_s, address, worker, server, host, pid)
