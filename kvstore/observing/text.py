"""What ``kvstore-status`` prints of a job: lines for people. Pure."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from kvstore import wire
from kvstore.job.place import ObservingPlace
from kvstore.observing import quantities as q
from kvstore.observing.advice import Advice
from kvstore.observing.columns import Column, Label, TextLine, member_table
from kvstore.observing.figures import LONG_S, MemberWait, job_rounds_per_s, link_rates, waits
from kvstore.observing.quantities import Quantity, members
from kvstore.observing.view import JobView, MemberView

SILENT_S = 4.0  # members beat each second or so
EVENTS = 8
WIDTH = 110  # characters of long texts
_STYLES = {"info": "plain", "warning": "odd", "error": "bad"}
SERVING = ("server", "standby", "aggregator")
_Row: TypeAlias = "tuple[MemberView, q.Figures | None]"


@dataclass(frozen=True)
class StatusParts:
    """What is shown beside the members; ``places``: of workers that others wait for, where they are, by rank."""

    everybody: bool = False
    links: bool = False
    advice: Sequence[Advice] = ()
    places: Mapping[int, str] = field(default_factory=dict)


def status_lines(place: ObservingPlace, view: JobView, parts: StatusParts) -> list[TextLine]:
    """Return how a job is, in lines."""
    found = waits(view, 0.0 if parts.everybody else LONG_S)
    sections = [
        _head(place, view),
        _waits(view, found, parts.places),
        _advice(parts.advice),
        _members(view, ("worker",), q.OF_WORKERS, _awaited(found, parts.advice), parts.everybody),
        _members(view, SERVING, q.OF_SERVERS, set(), parts.everybody),
        _links(view) if parts.links else [],
        _events(view, None if parts.everybody else EVENTS),
    ]
    titles = ("", "who waits for whom", "advice", "workers", "servers", "bytes a second over each link", "events")
    lines: list[TextLine] = []
    for title, section in zip(titles, sections, strict=True):
        if section and title:
            lines += [TextLine(""), TextLine(title, "title")]
        lines += section
    return lines


def silent_scheduler_lines(place: ObservingPlace, why: str) -> list[TextLine]:
    return [*_name(place), TextLine(f"  {why}", "bad")]


def job_lines(jobs: Sequence[tuple[ObservingPlace, str]]) -> list[TextLine]:
    by, how = (
        max(map(len, column)) for column in zip(*((place.launcher, words) for place, words in jobs), strict=True)
    )
    title = TextLine(f"{len(jobs)} jobs of this user run here; kvstore-status PID shows one of them", "title")
    return [
        title,
        *(
            TextLine(f"  {place.pid:>8}  {place.launcher:<{by}}  {words:<{how}}  {place.command[:80]}")
            for place, words in jobs
        ),
    ]


def _name(place: ObservingPlace) -> list[TextLine]:
    described = [place.job or place.address.partition("?")[0]]
    if place.launcher:
        described.append(place.launcher)
    if place.pid:
        described.append(f"pid {place.pid}")
    if place.started:
        described.append("started " + time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(place.started)))
    head = [TextLine(place.command, "title")] if place.command else []
    return [*head, TextLine("  " + " · ".join(described))]


def _head(place: ObservingPlace, view: JobView) -> list[TextLine]:
    counts = []
    wanted = (view.num_workers, view.num_servers, view.num_standbys, view.num_aggregators)
    for role, number in zip(("worker", *SERVING), wanted, strict=True):
        if number:
            ready = sum(member.state in ("joined", "ready") for member in view.of_role(role))
            counts.append(f"{ready} of {number} {role}{'s' if number > 1 else ''}")
    per_s = job_rounds_per_s(view)
    rounds = max((member.worker.latest.rounds for member in view.members if member.worker is not None), default=0)
    host = "".join(_hosts(view)) if len(_hosts(view)) == 1 else ""
    here = f" on {host}" if host else ""
    running = [f"runs for {q.duration(view.at - view.started)}{here}", ", ".join(counts)]
    if per_s is not None:
        running.append(f"{rounds} rounds, {q.rate(per_s)} a second")
    lines = [*_name(place), TextLine("  " + " · ".join(running))]
    logged = _logged(view)
    if logged:
        lines.append(TextLine(f"  {logged}"))
    if view.failure is not None:
        lines.append(TextLine(f"  the job has failed: {view.failure}", "bad"))
    return lines


def _hosts(view: JobView) -> set[str]:
    return {member.host for member in view.members}


def _labels(view: JobView) -> list[Label[Any]]:
    """Return where processes are: their hosts only if these differ, for the head has the name of a single one."""
    pid: Label[Any] = Label("pid", lambda row: str(row[0].pid or ""))
    host: Label[Any] = Label("host", lambda row: row[0].host)
    return [pid, host] if len(_hosts(view)) > 1 else [pid]


def _logged(view: JobView) -> str:
    """What the worker of the lowest rank that logs anything has logged last."""
    for member in view.of_role("worker"):
        if member.worker is not None and member.worker.latest.values:
            pairs = member.worker.latest.values
            return f"{member.name} logs " + ", ".join(f"{name} {number:.4g}" for name, number in pairs)
    return ""


def _waits(view: JobView, found: Sequence[MemberWait], places: Mapping[int, str]) -> list[TextLine]:
    lines = [TextLine(f"  {wait.text}", "bad" if wait.seconds >= SILENT_S else "odd") for wait in found]
    if view.waits:
        lines.append(TextLine(f"  scheduler: {view.waits}", "odd"))
    lines += [TextLine(f"  worker {rank} {where}", "bad") for rank, where in places.items()]
    return lines


def _advice(advice: Sequence[Advice]) -> list[TextLine]:
    """Return the advice, without the kind ``stuck``, which is among the waits already."""
    lines: list[TextLine] = []
    for one in advice:
        if one.kind != "stuck":
            lines += _wrapped("  - ", one.text, _STYLES[one.severity])
    return lines


def _wrapped(start: str, text: str, style: str = "plain") -> list[TextLine]:
    """Return a long text in lines of a readable width, the first of which begins with ``start``."""
    whole = text.replace(" %", "\u00a0%")  # a number and its sign stay together
    parts = textwrap.wrap(whole, WIDTH - len(start), break_long_words=False) or [""]
    starts = [start, *[" " * len(start)] * (len(parts) - 1)]
    return [TextLine(begin + part.replace("\u00a0", " "), style) for begin, part in zip(starts, parts, strict=True)]


def _words(member: MemberView) -> str:
    if member.state in ("left", "lost"):
        return member.state
    return "silent" if member.silent_s >= SILENT_S else member.state


def _beat(row: _Row) -> float | None:
    return row[0].silent_s if row[0].state == "ready" else None


def _columns(table: Sequence[Quantity[Any]]) -> list[Column[_Row]]:
    """Return the columns that ``table`` has titles for, behind the last sign of life."""
    columns: list[Column[_Row]] = [Column("beat", _beat, q.duration, SILENT_S)]
    for each in table:
        if each.title:
            columns.append(Column(each.title, partial(_figure, each.figure), each.show, each.least, each.part))
    return columns


def _figure(name: str, row: _Row) -> float | None:
    return None if row[1] is None else row[1][name]


def _awaited(found: Sequence[MemberWait], advice: Sequence[Advice]) -> set[tuple[str, int]]:
    """Return the workers that others have waited for, and stragglers, by role and rank."""
    waits = {("worker", rank) for wait in found if wait.seconds >= LONG_S for rank in wait.missing}
    return waits | {(one.role, one.rank) for one in advice if one.straggler}


def _members(
    view: JobView, roles: Sequence[str], table: Sequence[Quantity[Any]], notable: set[tuple[str, int]], everybody: bool
) -> list[TextLine]:
    rows: list[_Row] = [(member, q.figures_of(member)) for role in roles for member in view.of_role(role)]
    return member_table(
        rows,
        _columns(table),
        _title,
        lambda row: _words(row[0]),
        lambda row: _words(row[0]) in ("lost", "silent") or (row[0].role, row[0].rank) in notable,
        everybody,
        _labels(view),
    )


def _title(row: _Row) -> str:
    member = row[0]
    return member.name if member.rank >= 0 else f"a {member.role}"


def _links(view: JobView) -> list[TextLine]:
    lines = []
    for member in view.of_role("worker"):
        if member.worker is None:
            continue
        for peer, (sent, received) in enumerate(link_rates(member.worker)):
            if sent or received:
                text = f"{q.nbytes(sent):>9} sent  {q.nbytes(received):>9} received"
                lines.append(TextLine(f"  {member.name:<10} {peer:>4}  {text}"))
    return lines


def _events(view: JobView, most: int | None) -> list[TextLine]:
    events = view.events if most is None else view.events[-most:]
    return [line for event in events for line in _wrapped(f"  {q.duration(view.at - event.at):>12} ago  ", event.text)]


# ---- the stacks of members: equal ones once

_Threads: TypeAlias = "tuple[tuple[str, tuple[str, ...]], ...]"  # names, and frames

OURS = "kvstore "  # begins the names of this package's threads


@dataclass(frozen=True)
class LocatedMember:
    """Where a member is, in words that follow its name: ``is at train.py:41 in load_batch``; its answer, if any."""

    role: str
    rank: int
    place: str
    stacks: wire.Stacks | None


def located_members(role: str, places: Mapping[int, str], answers: Iterable[wire.Stacks]) -> list[LocatedMember]:
    """Return where members of one role are, by rank; ``places``: in words, by rank."""
    by_rank = {stacks.node.rank: stacks for stacks in answers}
    return [LocatedMember(role, rank, place, by_rank.get(rank)) for rank, place in sorted(places.items())]


def stacks_lines(located: Iterable[LocatedMember], all_threads: bool = False) -> list[TextLine]:
    """Innermost frames are last. Members of one role at the same place with the same stacks are shown once."""
    same: dict[tuple[str, str, _Threads], list[int]] = {}
    for member in located:
        threads = () if member.stacks is None else tuple(_threads(member.stacks, all_threads))
        same.setdefault((member.role, member.place, threads), []).append(member.rank)
    lines: list[TextLine] = []
    for (role, place, threads), ranks in same.items():
        who = members(role, ranks)
        lines += [TextLine(""), TextLine(f"{who}{'' if len(ranks) == 1 else ': each'} {place}", "title")]
        for name, frames in threads:
            lines.append(TextLine(f"  {name}"))
            lines += [TextLine(f"    {frame}", "faint") for frame in frames]
    return lines


def _threads(stacks: wire.Stacks, all_threads: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, frames in stacks.threads:
        if all_threads or not name.startswith(OURS):
            yield name, tuple(frames)
