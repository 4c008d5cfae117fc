"""What Prometheus reads at ``/metrics``: all members of a job, from the observer's latest view of it.

``families`` is pure. ``exposition`` writes its result in Prometheus' text format, version 0.0.4, by prometheus-client,
the extra ``dashboard``: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, TypeAlias, TypeVar

import kvstore
from kvstore import wire
from kvstore.errors import UsageError
from kvstore.observing.advice import KINDS, advise
from kvstore.observing.quantities import MICRO, OF_MEMBERS, OF_SERVERS, OF_WORKERS, Kind, Quantity
from kvstore.observing.view import AnyReport, JobView, MemberView

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ROLES = ("worker", "server", "standby", "aggregator")
STATES = ("joined", "ready", "left", "lost")
GONE = ("left", "lost")
STALE_S = 15.0  # a view that is older says nothing of the job now
MOST_PAIRS = 8192  # of workers and servers, of which each pair has series of its own

R = TypeVar("R")


Labels: TypeAlias = Mapping[str, str]

PREFIX = "kvstore_"


@dataclass
class MetricFamily:
    """A metric: the number of each set of labels; of a counter, the name is without ``_total``."""

    name: str
    kind: Kind
    meaning: str
    samples: list[tuple[Labels, float]] = field(default_factory=list)

    def add(self, number: float, /, **labels: str) -> None:
        self.samples.append((labels, number))


@dataclass(frozen=True)
class JobDescription:
    """What a job is called.

    Attributes:
        name: no other job on the host has it.
        command: what its workers run.
    """

    name: str = ""
    command: str = ""

    @property
    def program(self) -> str:
        """What the command runs, without its arguments: they may be secret, and Prometheus keeps what it gets."""
        try:
            words = shlex.split(self.command)
        except ValueError:  # a quote without its second
            words = self.command.split()[:1]
        for word, after in itertools.pairwise([*words, ""]):
            if word == "-m":
                return after
            if word.endswith((".py", ".sh")) and not word.startswith("-"):
                return PurePath(word).name
        return PurePath(words[0]).name if words else ""


def exposition(view: JobView | None, age_s: float = 0.0, about: JobDescription | None = None) -> bytes:
    """Return the answer to ``GET /metrics``, of a view that is ``age_s`` old. UsageError without prometheus-client."""
    try:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        from prometheus_client.exposition import generate_latest
    except ImportError as exc:
        raise UsageError(f"/metrics needs prometheus-client: pip install 'torch-kvstore[dashboard]' ({exc})") from None
    types = {"counter": (CounterMetricFamily, "_total"), "gauge": (GaugeMetricFamily, "")}
    converted = []
    for family in families(view, age_s, about or JobDescription()):
        made, suffix = types[family.kind]
        metric = made(family.name, family.meaning)
        for labels, number in family.samples:
            metric.add_sample(family.name + suffix, dict(labels), number)
        converted.append(metric)
    return bytes(generate_latest(_Collected(converted)))


@dataclass(frozen=True)
class _Collected:
    """What prometheus-client calls a collector."""

    metrics: Sequence[Any]

    def collect(self) -> Iterable[Any]:
        return self.metrics


def families(view: JobView | None, age_s: float, about: JobDescription) -> Iterator[MetricFamily]:
    """Return every metric that has a number.

    A member that has left or is lost keeps the series of its state, and no other: what it did last is not what it does
    now. Members without a rank are counted, no more. The same holds for all members if the view is stale.
    """
    current = view if age_s <= STALE_S else None
    yield _single(
        "scheduler_up",
        "gauge",
        "1 if the scheduler has answered in the last 15 s, else 0; then no member is shown.",
        current is not None,
    )
    info = _family(
        "job_info",
        "gauge",
        "Always 1. The labels have the job's name, the program of its workers, and kvstore's version.",
    )
    info.add(1, name=about.name, program=about.program, version=kvstore.__version__)
    yield info
    if current is not None:
        made = (*_job(current), *_members(current), *_advice(current), *_reports(current))
        yield from (family for family in made if family.samples)


def _job(view: JobView) -> Iterator[MetricFamily]:
    yield _single("job_running_seconds", "gauge", "Seconds since the scheduler began.", view.at - view.started)
    yield _single("job_failed", "gauge", "1 if the job has failed, else 0.", view.failure is not None)
    yield _single(
        "scheduler_waits", "gauge", "1 if members wait at a barrier, or for others to join, else 0.", bool(view.waits)
    )
    events = view.events[-1].number if view.events else 0  # they are numbered from 1 on
    yield _single(
        "events", "counter", "Events that the scheduler has noted: members that came and went, and news.", events
    )
    expected = _family("members_expected", "gauge", "How many members of each role the job has.")
    counted = _family("members", "gauge", "How many members are in each state.")
    numbers = (view.num_workers, view.num_servers, view.num_standbys, view.num_aggregators)
    for role, number in zip(ROLES, numbers, strict=True):
        here = [member.state for member in view.members if member.role == role]
        if number or here:
            expected.add(number, role=role)
            for state in STATES:
                counted.add(here.count(state), role=role, state=state)
    yield expected
    yield counted


def _members(view: JobView) -> Iterator[MetricFamily]:
    state = _family("member_state", "gauge", "1 for the state that the member is in, 0 for the others.")
    silence = _family("member_silence_seconds", "gauge", "Seconds since the member's last sign of life.")
    for member in _ranked(view):
        who = _labels(member)
        for name in STATES:
            state.add(member.state == name, **who, state=name)
        if member.state not in GONE:
            silence.add(member.silent_s, **who)
    yield state
    yield silence


def _advice(view: JobView) -> Iterator[MetricFamily]:
    advice = advise(view)
    given = _family("advice", "gauge", "How many pieces of advice of each kind the observer gives now.")
    for kind in KINDS:
        given.add(sum(each.kind == kind for each in advice), kind=kind)
    yield given
    named = {(each.role, each.rank) for each in advice if each.straggler}
    straggler = _family("straggler", "gauge", "1 if all others wait for the worker, else 0.")
    for member in _ranked(view):
        if member.role == "worker" and member.state not in GONE:
            straggler.add((member.role, member.rank) in named, **_labels(member))
    yield straggler


def _reports(view: JobView) -> Iterator[MetricFamily]:
    present = [member for member in _ranked(view) if member.state not in GONE]
    workers = [(member, member.worker.latest) for member in present if member.worker is not None]
    others = [(member, member.server.latest) for member in present if member.server is not None]
    every: list[tuple[MemberView, AnyReport]] = [*workers, *others]
    yield from _numbers(OF_MEMBERS, every)
    yield from _numbers([each for each in OF_WORKERS if each not in OF_MEMBERS], workers)
    yield from _numbers([each for each in OF_SERVERS if each not in OF_MEMBERS], others)
    in_pairs = view.num_workers * max(view.num_servers, 1) <= MOST_PAIRS
    yield from _links(workers, view.num_aggregators > 0, in_pairs)
    yield from _lateness(others, in_pairs)
    values = _family("training_value", "gauge", "The latest number that the worker's program has logged under a name.")
    for member, report in workers:
        latest: dict[str, float] = {}  # a worker could say a name twice
        for name, number in report.values:
            latest[name] = number
        for name, number in latest.items():
            values.add(number, **_labels(member), name=name)
    yield values


def _numbers(table: Sequence[Quantity[R]], reports: Sequence[tuple[MemberView, R]]) -> Iterator[MetricFamily]:
    for quantity in table:
        series = quantity.series
        if series is None:
            continue
        family = _family(series.name, series.kind, series.meaning)
        for member, report in reports:
            if (number := series.read(report)) is not None:
                family.add(number, **_labels(member))
        yield family


def _links(
    workers: Sequence[tuple[MemberView, wire.WorkerReport]], aggregated: bool, in_pairs: bool
) -> Iterator[MetricFamily]:
    """Bytes of each worker's links; without ``in_pairs``, of all of its links together."""
    to = "The label server has its rank, or aggregator where the worker has one."
    for name, words in ("sent", "has sent to"), ("received", "has received from"):
        family = _family(f"worker_{name}_bytes", "counter", f"Bytes that the worker {words} the server. {to}")
        for member, report in workers:
            counts: Sequence[int] = getattr(report, name)
            if not in_pairs:
                family.add(sum(counts), **_labels(member), server="all")
            elif aggregated and len(counts) == 1:
                family.add(counts[0], **_labels(member), server="aggregator")
            else:
                for server, count in enumerate(counts):
                    family.add(count, **_labels(member), server=str(server))
        yield family


def _lateness(others: Sequence[tuple[MemberView, wire.ServerReport]], in_pairs: bool) -> Iterator[MetricFamily]:
    """For each worker, how often it came last at a server, of how many rounds; without ``in_pairs``, at all of a role.

    ``server_waves`` has the same roles and ranks as the others, so that one can be divided by the other.
    """
    waves = _family("server_waves", "counter", "Rounds in which the server has noted which worker came last.")
    last = _family("server_last_arrivals", "counter", "Rounds in which the worker's push came last at the server.")
    alone = _family(
        "server_alone_awaited_seconds", "counter", "Seconds that others have waited at the server for the worker alone."
    )
    rounds: dict[tuple[str, str], int] = {}
    totals: dict[tuple[str, str, int], tuple[int, int]] = {}
    for member, report in others:
        rank = str(member.rank) if in_pairs else "all"
        rounds[member.role, rank] = rounds.get((member.role, rank), 0) + report.waves
        for worker, counts in enumerate(zip(report.came_last, report.alone_us, strict=True)):
            before = totals.get((member.role, rank, worker), (0, 0))
            totals[member.role, rank, worker] = (before[0] + counts[0], before[1] + counts[1])
    for (role, rank), number in rounds.items():
        waves.add(number, role=role, rank=rank)
    for (role, rank, worker), (number, alone_us) in totals.items():
        last.add(number, role=role, rank=rank, worker=str(worker))
        alone.add(alone_us / MICRO, role=role, rank=rank, worker=str(worker))
    yield waves
    yield last
    yield alone


def _ranked(view: JobView) -> list[MemberView]:
    """The members that have a rank; of several processes with one, the latest, for each series may be there once."""
    latest: dict[tuple[str, int], MemberView] = {}
    for member in sorted(view.members, key=lambda member: member.incarnation):
        if member.rank >= 0:
            latest[member.role, member.rank] = member
    return list(latest.values())


def _labels(member: MemberView) -> dict[str, str]:
    return {"role": member.role, "rank": str(member.rank)}


def _family(name: str, kind: Kind, meaning: str) -> MetricFamily:
    return MetricFamily(PREFIX + name, kind, meaning)


def _single(name: str, kind: Kind, meaning: str, number: float) -> MetricFamily:
    family = _family(name, kind, meaning)
    family.add(number)
    return family
