"""What the page is told of a job at one moment, and what of it is drawn over time. Pure.

A ``snapshot`` becomes JSON. Its names are the page's: ``page/page.js`` reads them. Rates are over the last six seconds
or so. Unknown numbers are None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

from kvstore.observing.advice import advise
from kvstore.observing.figures import job_rounds_per_s, link_rates, logged_values
from kvstore.observing.quantities import OF_SERVERS, OF_WORKERS, Figures, Quantity, figures_of
from kvstore.observing.view import JobView, MemberView

MOST_EVENTS = 60  # in one snapshot
MOST_VALUES = 8  # of the values that programs log, which are drawn
_DRAWN = {"waiting": "waits", "busy": "busy", "cores": "cores", "memory": "memory"}  # of each member that has it
_ROLES = ("server", "standby", "aggregator")


def snapshot(view: JobView) -> dict[str, Any]:
    late = lateness(view)
    return {
        "expected": {
            "worker": view.num_workers,
            "server": view.num_servers,
            "standby": view.num_standbys,
            "aggregator": view.num_aggregators,
        },
        "failure": view.failure,
        "waits": view.waits,
        "figures": {name: _rounded(value) for name, value in figures(view).items()},
        "workers": [_worker(member, *late.get(member.rank, (None, None))) for member in view.of_role("worker")],
        "servers": [_server(member) for role in _ROLES for member in view.of_role(role)],
        "waiting": waiting(view),
        "values": values(view),
        "advice": [
            {"kind": each.kind, "about": each.about, "text": each.text, "severity": each.severity}
            for each in advise(view)
        ],
        "events": [
            {"number": event.number, "at": event.at - view.started, "text": event.text}
            for event in view.events[-MOST_EVENTS:]
        ],
    }


def figures(view: JobView) -> dict[str, float | None]:
    """Return the numbers of the whole job; None for numbers that no member has reported yet."""
    workers = [of for _, of in _at_work(view, "worker")]
    servers = [of for _, of in _at_work(view, *_ROLES)]
    own = [of for _, of in _at_work(view, "server")]
    waits = _known(workers, "waits")
    return {
        "rounds": job_rounds_per_s(view),
        "round": max(_known(workers, "rounds"), default=None),
        "waiting": fmean(waits) if waits else None,
        "busy": max(_known(own, "busy"), default=None),
        "pushed": _total(workers, "sent_per_s"),
        "pulled": _total(workers, "received_per_s"),
        "worker memory": _total(workers, "memory"),
        "server memory": _total(servers, "memory"),
        "held": _total(own, "held"),
        "ahead": max(_known(workers, "ahead"), default=None),
    }


def values(view: JobView) -> dict[str, float]:
    """Return what programs have logged by its names: the mean over the workers that have."""
    found: dict[str, list[float]] = {}
    for member in view.of_role("worker"):  # also of workers that have left
        for name, value in logged_values(member.worker).items() if member.worker is not None else ():
            if math.isfinite(value) and (name in found or len(found) < MOST_VALUES):
                found.setdefault(name, []).append(value)
    return {name: fmean(numbers) for name, numbers in found.items()}


def drawn(view: JobView) -> dict[str, float]:
    """Return what of a view is kept to be drawn, by the names of columns."""
    columns: dict[str, float | None] = {name: value for name, value in figures(view).items() if name != "round"}
    columns.update({f"value {name}": value for name, value in values(view).items()})
    for member, of in _at_work(view, "worker", *_ROLES):
        sent = of["sent_per_s"]
        columns |= {f"{member.name} {name}": of[figure] for name, figure in _DRAWN.items() if figure in of}
        columns[f"{member.name} traffic"] = None if sent is None else sent + (of["received_per_s"] or 0.0)
    return {name: value for name, value in columns.items() if value is not None}


def waiting(view: JobView) -> list[dict[str, Any]]:
    found = [
        (reports.latest.oldest_us / 1e6, member, reports.latest)
        for member in view.members
        if _is_there(member) and (reports := member.server) is not None and reports.latest.oldest_us
    ]
    return [
        {
            "at": member.title,
            "waiting": list(latest.waiting),
            "missing": list(latest.missing),
            "seconds": seconds,
            "why": latest.why,
        }
        for seconds, member, latest in sorted(found, key=lambda wait: -wait[0])
    ]


def lateness(view: JobView) -> dict[int, tuple[float | None, float | None]]:
    """Return for each worker in which part of the rounds it came last, and in which part of the time others waited for
    it alone: of all servers' rounds, and at the server where they waited the longest.
    """
    reports = [member.server for member in view.members if _is_there(member) and member.server is not None]
    waves = sum(each.latest.waves - each.before.waves for each in reports)
    last: dict[int, int] = {}
    alone: dict[int, float] = {}
    for each in reports:
        for worker, number in enumerate(each.grown("came_last")):
            last[worker] = last.get(worker, 0) + number
        if each.seconds > 0:
            for worker, microseconds in enumerate(each.grown("alone_us")):
                alone[worker] = max(alone.get(worker, 0.0), microseconds / 1e6 / each.seconds)
    return {
        worker: (_rounded(number / waves) if waves > 0 else None, _rounded(alone.get(worker)))
        for worker, number in last.items()
    }


def _worker(member: MemberView, last: float | None, alone: float | None) -> dict[str, Any]:
    if member.worker is None:
        return _member(member)
    links = [round(sent + received) for sent, received in link_rates(member.worker)]
    return _member(member) | _numbers(OF_WORKERS, member) | {"last": last, "alone": alone, "links": links}


def _server(member: MemberView) -> dict[str, Any]:
    if member.server is None:
        return _member(member)
    return _member(member) | _numbers(OF_SERVERS, member) | {"waiting": len(member.server.latest.waiting)}


def _numbers(table: Sequence[Quantity[Any]], member: MemberView) -> dict[str, float | None]:
    figures = figures_of(member) or {}
    return {each.page: _rounded(figures[each.figure]) for each in table if each.page}


def _member(member: MemberView) -> dict[str, Any]:
    return {
        "role": member.role,
        "rank": member.rank,
        "name": member.name,
        "starts": member.incarnation,
        "state": member.state,
        "silent": member.silent_s,
        "address": member.address,
        "host": member.host,
        "pid": member.pid or None,
    }


def _is_there(member: MemberView) -> bool:
    """Whether what a member has reported is of now."""
    return member.state in ("joined", "ready")


def _at_work(view: JobView, *roles: str) -> Iterator[tuple[MemberView, Figures]]:
    for role in roles:
        for member in view.of_role(role):
            if _is_there(member) and (of := figures_of(member)) is not None:
                yield member, of


def _known(figures: Iterable[Figures], name: str) -> list[float]:
    return [number for of in figures if (number := of[name]) is not None]


def _total(figures: Iterable[Figures], name: str) -> float | None:
    known = _known(figures, name)
    return sum(known) if known else None


def _rounded(value: float | None) -> float | None:
    return round(value, 4) if value is not None and math.isfinite(value) else None
