"""What the page is told of a job at one moment, and what of it is drawn over time. Pure.

A ``snapshot`` becomes JSON. Its names are the page's: ``page/page.js`` reads them. Rates are over the last ten seconds
or so. Unknown numbers are None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from kvstore.observing.view import JobView, MemberView
from kvstore.observing.view import Span as Reports
from kvstore.wire import ServerReport, WorkerReport

MOST_EVENTS = 60  # in one snapshot
MOST_VALUES = 8  # of the values that programs log, which are drawn
_ROLES = ("server", "standby", "aggregator")


def snapshot(view: JobView, advice: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the page shows of a job.

    Args:
        view: how the job is.
        advice: what is said about it; see ``kvstore.observing.advice``.
    """
    late = lateness(view)
    workers = [_worker(member, late.get(member.rank, (None, None))) for member in view.of_role("worker")]
    servers = [_server(member) for role in _ROLES for member in view.of_role(role)]
    return {
        "age": max(0.0, view.at - view.started),
        "expected": {
            "worker": view.num_workers,
            "server": view.num_servers,
            "standby": view.num_standbys,
            "aggregator": view.num_aggregators,
        },
        "failure": view.failure,
        "waits": view.waits,
        "figures": _number_or_none(figures(view)),
        "workers": workers,
        "servers": servers,
        "waiting": waiting(view),
        "values": values(view),
        "advice": list(advice),
        "events": [
            {"number": event.number, "at": event.at - view.started, "text": event.text}
            for event in view.events[-MOST_EVENTS:]
        ],
    }


def figures(view: JobView) -> dict[str, float]:
    """Return the numbers of the whole job; NaN for those that nobody has reported yet."""
    workers = [member for member in view.of_role("worker") if _counts(member)]
    servers = [member for role in _ROLES for member in view.of_role(role) if _counts(member)]
    of_workers = [member.worker for member in workers if member.worker is not None]
    of_servers = [member.server for member in servers if member.server is not None]
    waits = [_share(reports.rate("blocked_us")) for reports in of_workers if reports.seconds > 0]
    own = [member.server for member in servers if member.role == "server" and member.server is not None]
    return {
        "rounds": max((reports.rate("rounds") for reports in of_workers if reports.seconds > 0), default=math.nan),
        "round": max((reports.latest.rounds for reports in of_workers), default=math.nan),
        "waiting": fmean(waits) if waits else math.nan,
        "busy": max((_share(reports.rate("busy_us")) for reports in own if reports.seconds > 0), default=math.nan),
        "pushed": _total(_grown(reports, "sent") for reports in of_workers),
        "pulled": _total(_grown(reports, "received") for reports in of_workers),
        "worker memory": _total(float(reports.latest.memory) for reports in of_workers),
        "server memory": _total(float(reports.latest.memory) for reports in of_servers),
        "held": _total(float(reports.latest.held) for reports in own),
        "ahead": max((reports.latest.ahead for reports in of_workers), default=math.nan),
    }


def values(view: JobView) -> dict[str, float]:
    """Return what programs have logged by its names: the mean over the workers that have."""
    found: dict[str, list[float]] = {}
    for member in view.of_role("worker"):
        if member.worker is not None:
            for name, value in member.worker.latest.values:
                if math.isfinite(value) and (name in found or len(found) < MOST_VALUES):
                    found.setdefault(name, []).append(value)
    return {name: fmean(numbers) for name, numbers in found.items()}


def drawn(view: JobView) -> dict[str, float]:
    """Return what of a view is kept to be drawn, by the names of columns."""
    columns = {name: value for name, value in figures(view).items() if name != "round"}
    columns.update({f"value {name}": value for name, value in values(view).items()})
    for member in view.members:
        if not _counts(member):
            continue
        if (reports := member.worker) is not None and reports.seconds > 0:
            columns[f"{member.name} waiting"] = _share(reports.rate("blocked_us"))
            columns[f"{member.name} traffic"] = _grown(reports, "sent") + _grown(reports, "received")
        if (of_server := member.server) is not None and of_server.seconds > 0:
            columns[f"{member.name} busy"] = _share(of_server.rate("busy_us"))
            columns[f"{member.name} traffic"] = of_server.rate("sent") + of_server.rate("received")
        if (either := member.worker or member.server) is not None:
            columns[f"{member.name} memory"] = float(either.latest.memory)
            if either.seconds > 0:
                columns[f"{member.name} cores"] = _share(either.rate("cpu_us"))
    return columns


def waiting(view: JobView) -> list[dict[str, Any]]:
    """Return who waits for whom at this moment, the longest wait first."""
    found = [
        {
            "at": member.title,
            "waiting": list(reports.latest.waiting),
            "missing": list(reports.latest.missing),
            "seconds": reports.latest.oldest_us / 1e6,
            "why": reports.latest.why,
        }
        for member in view.members
        if _counts(member) and (reports := member.server) is not None and reports.latest.oldest_us
    ]
    return sorted(found, key=lambda wait: -float(str(wait["seconds"])))


def lateness(view: JobView) -> dict[int, tuple[float | None, float | None]]:
    """Return for each worker in which part of the rounds it came last, and in which part of the time others waited for
    it alone: of all servers' rounds, and at the server where they waited the longest.
    """
    reports = [member.server for member in view.members if _counts(member) and member.server is not None]
    waves = sum(each.latest.waves - each.before.waves for each in reports)
    last: dict[int, int] = {}
    alone: dict[int, float] = {}
    for each in reports:
        for worker, number in enumerate(_since(each.before.came_last, each.latest.came_last)):
            last[worker] = last.get(worker, 0) + number
        if each.seconds > 0:
            for worker, microseconds in enumerate(_since(each.before.alone_us, each.latest.alone_us)):
                alone[worker] = max(alone.get(worker, 0.0), _share(microseconds / each.seconds))
    return {
        worker: (round(number / waves, 4) if waves > 0 else None, _number(alone.get(worker, math.nan), True))
        for worker, number in last.items()
    }


def _since(before: Sequence[int], latest: Sequence[int]) -> list[int]:
    """By how much each count has grown; there may be more counts than before."""
    return [now - then for now, then in zip(latest, [*before, *[0] * (len(latest) - len(before))], strict=False)]


def _worker(member: MemberView, late: tuple[float | None, float | None]) -> dict[str, Any]:
    told = _member(member)
    if (reports := member.worker) is None:
        return told
    latest, known = reports.latest, reports.seconds > 0
    told.update(
        rounds=latest.rounds,
        rate=_number(reports.rate("rounds"), known),
        waiting=_number(_share(reports.rate("blocked_us")), known),
        input=_number(_share(reports.rate("input_us")), known and reports.before.input_us >= 0),
        outstanding=latest.outstanding,
        ahead=latest.ahead,
        last=late[0],
        alone=late[1],
        sent=_number(_grown(reports, "sent"), known),
        received=_number(_grown(reports, "received"), known),
        links=_links(reports) if known else [],
        **_process(reports),
    )
    return told


def _server(member: MemberView) -> dict[str, Any]:
    told = _member(member)
    if (reports := member.server) is None:
        return told
    latest, known = reports.latest, reports.seconds > 0
    told.update(
        rounds=latest.rounds,
        rate=_number(reports.rate("rounds"), known),
        busy=_number(_share(reports.rate("busy_us")), known),
        held=latest.held,
        sent=_number(reports.rate("sent"), known),
        received=_number(reports.rate("received"), known),
        waiting=len(latest.waiting),
        **_process(reports),
    )
    return told


def _member(member: MemberView) -> dict[str, Any]:
    return {
        "role": member.role,
        "rank": member.rank,
        "name": member.name,
        "starts": member.incarnation,
        "state": member.state,
        "silent": member.silent_s,
        "address": member.address,
    }


def _process(reports: Reports[WorkerReport] | Reports[ServerReport]) -> dict[str, Any]:
    return {"memory": reports.latest.memory, "cores": _number(_share(reports.rate("cpu_us")), reports.seconds > 0)}


def _counts(member: MemberView) -> bool:
    """Whether what a member has reported is of now."""
    return member.state in ("joined", "ready")


def _links(reports: Reports[WorkerReport]) -> list[int]:
    """Bytes a second to and from each server, or the aggregator that stands in the place of all."""
    sent = _since(reports.before.sent, reports.latest.sent)
    received = _since(reports.before.received, reports.latest.received)
    return [round((there + back) / reports.seconds) for there, back in zip(sent, received, strict=False)]


def _grown(reports: Reports[WorkerReport], counts: str) -> float:
    """By how much the sum of counts for each server has grown in a second."""
    grown: int = sum(getattr(reports.latest, counts)) - sum(getattr(reports.before, counts))
    return grown / reports.seconds if reports.seconds > 0 else math.nan


def _share(microseconds_a_second: float) -> float:
    return max(0.0, microseconds_a_second / 1e6)


def _total(numbers: Iterable[float]) -> float:
    known = [number for number in numbers if not math.isnan(number)]
    return sum(known) if known else math.nan


def _number(value: float, known: bool) -> float | None:
    return round(value, 4) if known and math.isfinite(value) else None


def _number_or_none(numbers: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _number(value, True) for name, value in numbers.items()}
