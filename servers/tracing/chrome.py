"""A job's trace as events in the Trace Event Format, which chrome://tracing and ui.perfetto.dev read. Pure.

Each member is a process of the trace, each of its threads a track of spans ("X"). A request under way is an
asynchronous event ("b" and "e"), whose id is its sender and number. Arrows ("s", "t", "f") lead from where
a request left over where it was handled to where its answer came.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from kvstore import wire
from kvstore.job.contract import member_name, member_title
from kvstore.spec import Key
from kvstore.wire.tracing import ANSWERED, ASKED, HANDLED, MARK, SPAN
from servers.tracing.collected import CollectedNotes, MemberNotes

Clock: TypeAlias = "wire.Node"
ORDER = ("scheduler", "worker", "aggregator", "server", "standby")
MARKS = 0  # the track of what has happened at a moment
CATEGORY = "request"


# The sender, the number of the request, and whether the scheduler is asked: aggregators count these requests apart.
RequestId: TypeAlias = "tuple[wire.Node, int, bool]"
SCHEDULER = "the scheduler"  # as links call it


C = TypeVar("C", bound=Hashable)

TOLERANCE_S = 1e-6  # clocks that drift contradict each other by no more than that, and are taken as they are


# ---- the clocks of all members on one time line: that of the scheduler's first process
#
# What is known of two clocks is how far apart they are at most. A member's beats say so of its clock and the
# scheduler's: half a round trip around the offset. Every message says more: it was not received before it was sent.
# These are difference constraints (Cormen et al., Introduction to Algorithms, 22.4), which shortest paths solve. The
# shortest paths from the first clock give the greatest offset that each clock can have, those to it the least. The
# middle of the two is kept: differences of middles keep all constraints, and no clock is wrong by more than half of
# what was possible.


@dataclass(frozen=True)
class Aligned(Generic[C]):
    """The clocks on one time line."""

    shifts: Mapping[C, float]  # what to add to the times of each clock, in seconds
    errors: Mapping[C, float]  # by how much that may be wrong; infinite where nothing is known
    consistent: bool  # whether some shifts fit all that is known; if not, messages may seem to go back in time


class Bounds(Generic[C]):
    """What is known of clocks: how far each is ahead of each other at most, once they are shifted."""

    def __init__(self) -> None:
        self._measured: dict[tuple[C, C], float] = {}
        self._messages: dict[tuple[C, C], float] = {}
        self._clocks: dict[C, None] = {}

    def add(self, clock: C) -> None:
        self._clocks[clock] = None

    def measure(self, clock: C, other: C, offset: float, error: float) -> None:
        """Note that ``clock`` plus ``offset`` is ``other``, but for ``error`` at most."""
        self._note(self._measured, clock, other, offset + error)
        self._note(self._measured, other, clock, error - offset)

    def message(self, sender: C, receiver: C, sent: float, received: float) -> None:
        """Note that a message was sent and received at these times, each by the clock of its process."""
        self._note(self._messages, sender, receiver, received - sent)

    def align(self, first: C) -> Aligned[C]:
        both = dict(self._measured)
        for pair, bound in self._messages.items():
            both[pair] = min(bound, both.get(pair, math.inf))
        for bounds, consistent in ((both, True), (self._measured, False)):
            most, least = self._paths(bounds, first), self._paths({(b, a): w for (a, b), w in bounds.items()}, first)
            if most is not None and least is not None:
                return self._between(most, {clock: -path for clock, path in least.items()}, consistent)
        return self._between({first: 0.0}, {first: 0.0}, False)

    def _note(self, bounds: dict[tuple[C, C], float], clock: C, other: C, most: float) -> None:
        """Note that the shift of ``clock`` is at most that of ``other`` plus ``most``."""
        self.add(clock)
        self.add(other)
        if most < bounds.get((clock, other), math.inf):
            bounds[clock, other] = most

    def _paths(self, bounds: Mapping[tuple[C, C], float], first: C) -> dict[C, float] | None:
        """Return how far each clock is ahead of ``first`` at most; None if the bounds contradict each other."""
        paths = {first: 0.0}
        for _ in range(len(self._clocks) + 1):
            changed = False
            for (clock, other), most in bounds.items():
                if other in paths and paths[other] + most < paths.get(clock, math.inf) - TOLERANCE_S / 1000:
                    paths[clock] = paths[other] + most
                    changed = True
            if not changed:
                return paths
            if paths[first] < -TOLERANCE_S:
                return None
        return None

    def _between(self, most: Mapping[C, float], least: Mapping[C, float], consistent: bool) -> Aligned[C]:
        shifts: dict[C, float] = {}
        errors: dict[C, float] = {}
        for clock in self._clocks:
            bounds = [side[clock] for side in (most, least) if clock in side]
            shifts[clock] = sum(bounds) / len(bounds) if bounds else 0.0
            errors[clock] = abs(bounds[0] - bounds[1]) / 2 if len(bounds) == 2 else math.inf
        return Aligned(shifts, errors, consistent)


# ---- what one thread did, as spans that lie one after the other or inside each other
#
# Viewers show spans of a track as a stack, and cannot show two that overlap otherwise. A thread makes none, but an
# exception may cut one short, and the clock's steps are finite: what overlaps is cut.


@dataclass
class TrackSpan:
    """Something that took a while: from ``start`` to ``end``, in seconds."""

    start: float
    end: float
    name: str
    args: Mapping[str, Any] = field(default_factory=dict)


class Track:
    """The spans of one thread: in order, outer ones first, and cut where they overlap."""

    def __init__(self, spans: Sequence[TrackSpan]) -> None:
        self.spans = sorted(spans, key=lambda span: (span.start, -span.end))
        self._starts = [span.start for span in self.spans]
        self._outer: list[int] = []  # of each span, the place of the one around it; -1 for none
        open_: list[int] = []
        for place, span in enumerate(self.spans):
            while open_ and self.spans[open_[-1]].end <= span.start and not self._same(open_[-1], place):
                open_.pop()
            span.end = max(span.end, span.start)
            if open_:
                span.end = min(span.end, self.spans[open_[-1]].end)
            self._outer.append(open_[-1] if open_ else -1)
            open_.append(place)

    def around(self, at: float) -> TrackSpan | None:
        """Return the innermost span at a time; None if there is none."""
        place = bisect_right(self._starts, at) - 1
        while place >= 0 and self.spans[place].end < at:
            place = self._outer[place]
        return self.spans[place] if place >= 0 else None

    def outside(self, place: int) -> TrackSpan | None:
        """Return the span around the one at ``place``; None if there is none."""
        outer = self._outer[place]
        return self.spans[outer] if outer >= 0 else None

    def _same(self, one: int, other: int) -> bool:
        first, second = self.spans[one], self.spans[other]
        return first.start == second.start and first.end == second.end


# ---- which notes are about the same request: its sender, its handler, where the answer left, and when it came


class Moment(NamedTuple):
    """A time by the clock of a member, and the thread that was there."""

    node: wire.Node
    at: float
    thread: int


@dataclass
class TracedRequest:
    """A request, as far as it was noted; see ``kvstore.wire.tracing.ASKED``."""

    name: str = ""
    key: Key | None = None
    keys: int = 0
    nbytes: int = 0
    round: int = 0
    peer: str = ""
    asked: Moment | None = None
    handled: list[Moment] = field(default_factory=list)  # when a process began to work on it: twice if it came twice
    left: list[Moment] = field(default_factory=list)  # when an answer left
    answered: Moment | None = None


def requests_of(records: Mapping[wire.Node, Iterable[list[Any]]]) -> dict[RequestId, TracedRequest]:
    found: dict[RequestId, TracedRequest] = {}
    for node, noted in records.items():
        for record in noted:
            if record[1] == ASKED:
                _, _, at, seq, name, key, keys, nbytes, round_, thread, peer = record
                request = found.setdefault((node, seq, peer == SCHEDULER), TracedRequest())
                request.name, request.key, request.keys, request.nbytes = name, key, keys, nbytes
                request.round, request.peer, request.asked = round_, peer, Moment(node, at, thread)
            elif record[1] == ANSWERED:
                _, _, at, seq, thread, peer = record
                found.setdefault((node, seq, peer == SCHEDULER), TracedRequest()).answered = Moment(node, at, thread)
            elif record[1] == HANDLED:
                _take_handled(node, record, found)
    return found


def _take_handled(node: wire.Node, record: list[Any], found: dict[RequestId, TracedRequest]) -> None:
    _, _, start, left, _, thread, _, asker, seq, _, _, answered = record
    scheduler = node.role == "scheduler"
    if asker[0]:
        found.setdefault((wire.Node(*asker), seq, scheduler), TracedRequest()).handled.append(
            Moment(node, start, thread)
        )
    for other, number in answered:
        if other[0]:
            found.setdefault((wire.Node(*other), number, scheduler), TracedRequest()).left.append(
                Moment(node, left, thread)
            )


# ---- the events


class ChromeTrace:
    """The events of a job's trace. ``aligned`` has the clocks of the members."""

    def __init__(self, collected: CollectedNotes, rounds: str = "") -> None:
        self._collected = collected
        self._rounds = rounds
        self._members = sorted(collected.members.values(), key=lambda member: _place(member.node))
        self._records = {member.node: member.records() for member in self._members}
        self._requests = requests_of(self._records)
        self.aligned = _aligned(self._members, self._requests)
        self._pids = {member.node: pid for pid, member in enumerate(self._members, 1)}
        self._tids: dict[tuple[wire.Node, int], int] = {}
        self._tracks = {
            (member.node, thread): Track(spans)
            for member in self._members
            for thread, spans in self._spans(member).items()
        }
        self._first = min(self._times(), default=0.0)
        self._last = max((span.end for track in self._tracks.values() for span in track.spans), default=self._first)

    def events(self) -> Iterator[dict[str, Any]]:
        for member in self._members:
            yield from self._names(member)
        for (node, thread), track in self._tracks.items():
            yield from self._slices(node, thread, track)
        for member in self._members:
            yield from self._marks(member)
        for number, (who, request) in enumerate(self._requests.items(), 1):
            yield from self._request(number, who, request)

    @property
    def about(self) -> dict[str, Any]:
        lost = {_title(member.node): member.lost for member in self._members if member.lost}
        errors = {
            _title(member.node): round(1e6 * error, 1)
            for member in self._members
            if math.isfinite(error := self.aligned.errors[member.node])
        }
        return {
            "rounds": self._rounds,
            "records": self._collected.count,
            "records lost": lost,
            "chunks dropped by the scheduler": self._collected.dropped,
            "chunks refused": self._collected.refused,
            "requests without an answer": sum(
                request.asked is not None and request.answered is None for request in self._requests.values()
            ),
            "clock errors in us, at most": errors,
            "clocks are consistent": self.aligned.consistent,
        }

    # ---- times

    def _at(self, moment: Moment) -> float:
        """Return a time on the common time line."""
        return moment.at + self.aligned.shifts[moment.node]

    def _us(self, at: float) -> float:
        """Return a time as viewers want it: microseconds since the trace began."""
        return round(1e6 * (at - self._first), 3)

    def _times(self) -> Iterator[float]:
        for track in self._tracks.values():
            yield from (span.start for span in track.spans[:1])
        for request in self._requests.values():
            if request.asked is not None:
                yield self._at(request.asked)
        for member in self._members:
            shift = self.aligned.shifts[member.node]
            yield from (record[2] + shift for record in self._records[member.node] if record[1] == MARK)

    # ---- members and threads

    def _names(self, member: MemberNotes) -> Iterator[dict[str, Any]]:
        pid = self._pids[member.node]
        yield _meta(pid, 0, "process_name", name=_title(member.node))
        yield _meta(pid, 0, "process_sort_index", sort_index=pid)
        threads = [thread for node, thread in self._tracks if node == member.node]
        for thread in threads:
            tid = self._tid(member.node, thread)
            yield _meta(pid, tid, "thread_name", name=member.threads.get(thread, "a thread that has ended"))
            yield _meta(pid, tid, "thread_sort_index", sort_index=tid)

    def _tid(self, node: wire.Node, thread: int) -> int:
        """Return the number of a thread's track: small, for viewers read no large ones exactly."""
        return self._tids.setdefault((node, thread), 1 + sum(other == node for other, _ in self._tids))

    def _spans(self, member: MemberNotes) -> dict[int, list[TrackSpan]]:
        shift = self.aligned.shifts[member.node]
        spans: dict[int, list[TrackSpan]] = {}
        for record in self._records[member.node]:
            if record[1] == SPAN:
                _, _, start, end, thread, name, key, keys, nbytes, round_ = record
                about = _about(round=round_, bytes=nbytes, keys=keys)
                spans.setdefault(thread, []).append(
                    TrackSpan(start + shift, end + shift, _labelled(name, key, keys), about)
                )
            elif record[1] == ASKED:  # Perfetto draws arrows from the end of a span to the beginning of another
                at = record[2] + shift
                spans.setdefault(record[9], []).append(TrackSpan(at, at, f"send to {record[10]}"))
            elif record[1] == ANSWERED:
                at = record[2] + shift
                spans.setdefault(record[4], []).append(TrackSpan(at, at, f"answer from {record[5]}"))
            elif record[1] == HANDLED:
                spans.setdefault(record[5], []).append(self._handling(member.node, record, shift))
        return spans

    def _handling(self, here: wire.Node, record: Sequence[Any], shift: float) -> TrackSpan:
        _, _, start, _, end, _, name, asker, seq, nbytes, round_, answered = record
        args = _about(round=round_, bytes=nbytes, answers=len(answered))
        if not asker[0]:
            return TrackSpan(start + shift, end + shift, "replies", args)
        node = wire.Node(*asker)
        request = self._requests.get((node, seq, here.role == "scheduler"))
        label = name if request is None else _labelled(name, request.key, request.keys)
        return TrackSpan(start + shift, end + shift, label, {**args, "from": _title(node), "request": seq})

    # ---- events

    def _slices(self, node: wire.Node, thread: int, track: Track) -> Iterator[dict[str, Any]]:
        pid, tid = self._pids[node], self._tid(node, thread)
        for place, span in enumerate(track.spans):
            args = dict(span.args)
            outer = track.outside(place)
            if span.name.startswith("update") and outer is not None and "from" in outer.args:
                args["came last"] = outer.args["from"]
            start = self._us(span.start)
            yield {
                "ph": "X",
                "name": span.name,
                "cat": "work",
                "pid": pid,
                "tid": tid,
                "ts": start,
                "dur": round(self._us(span.end) - start, 3),
                "args": args,
            }

    def _marks(self, member: MemberNotes) -> Iterator[dict[str, Any]]:
        pid, shift = self._pids[member.node], self.aligned.shifts[member.node]
        for record in self._records[member.node]:
            if record[1] == MARK:
                at = self._us(record[2] + shift)
                yield {"ph": "i", "s": "p", "name": record[3], "cat": "news", "pid": pid, "tid": MARKS, "ts": at}

    def _request(self, number: int, who: RequestId, request: TracedRequest) -> Iterator[dict[str, Any]]:
        """Yield a request under way, and its arrows, whose ids must be integers."""
        asked = request.asked
        if asked is None:
            return
        node, seq, scheduler = who
        id_ = f"{node.role}-{node.rank}-{node.incarnation}-{seq}" + ("-scheduler" if scheduler else "")
        begin = self._us(self._at(asked))
        last = self._last if request.answered is None else self._at(request.answered)
        end = max(begin, self._us(last))
        args = _about(round=request.round, bytes=request.nbytes, keys=request.keys, request=seq)
        if request.answered is None:
            args["answered"] = "not while the trace was made"
        common = {
            "cat": CATEGORY,
            "id2": {"local": id_},  # of this process, so that viewers show it there
            "pid": self._pids[node],
            "tid": self._tid(node, asked.thread),
            "name": f"{_labelled(request.name, request.key, request.keys)} to {request.peer}",
        }
        yield {"ph": "b", "ts": begin, **common, "args": args}
        yield {"ph": "e", "ts": end, **common}
        yield from self._arrows(number, id_, request)

    def _arrows(self, number: int, id_: str, request: TracedRequest) -> Iterator[dict[str, Any]]:
        """Yield where the arrows of a request begin, pass and end. A trace has both ends of each, or neither."""
        noted = (request.asked, *request.handled, *request.left, request.answered)
        moments = sorted((moment for moment in noted if moment is not None), key=self._at)
        shown = [moment for moment in moments if self._is_shown(moment)]
        if request.asked in shown:
            shown = shown[shown.index(request.asked) :]
        if len(shown) < 2:
            return
        for place, moment in enumerate(shown):
            phase = "s" if place == 0 else "f" if place == len(shown) - 1 else "t"
            yield {
                "ph": phase,
                "name": CATEGORY,
                "cat": "arrow",
                "id": number,
                "pid": self._pids[moment.node],
                "tid": self._tid(moment.node, moment.thread),
                "ts": self._us(self._at(moment)),
                "args": {"id": id_},
                **({"bp": "e"} if phase != "s" else {}),
            }

    def _is_shown(self, moment: Moment) -> bool:
        track = self._tracks.get((moment.node, moment.thread))
        return track is not None and track.around(self._at(moment)) is not None


def _aligned(members: Sequence[MemberNotes], requests: Mapping[RequestId, TracedRequest]) -> Aligned[Clock]:
    bounds: Bounds[Clock] = Bounds()
    starts = {start for member in members for start in member.offsets}
    first = _scheduler(min(starts, default=1))
    bounds.add(first)
    for member in members:
        bounds.add(member.node)
        for start, (offset, error) in member.offsets.items():
            if member.node != _scheduler(start):
                bounds.measure(member.node, _scheduler(start), offset, error)
    for request in requests.values():
        if request.asked is not None:
            for came in request.handled[:1]:
                bounds.message(request.asked.node, came.node, request.asked.at, came.at)
        if request.answered is not None:
            for left in request.left[:1]:
                bounds.message(left.node, request.answered.node, left.at, request.answered.at)
    return bounds.align(first)


def _scheduler(start: int) -> wire.Node:
    return wire.Node("scheduler", 0, start)


def _place(node: wire.Node) -> tuple[int, int, int]:
    return ORDER.index(node.role) if node.role in ORDER else len(ORDER), node.rank, node.incarnation


def _title(node: wire.Node) -> str:
    name = member_title("scheduler", 0) if node.role == "scheduler" else member_name(node.role, node.rank)
    return name if node.incarnation == 1 else f"{name}, start {node.incarnation}"


def _labelled(name: str, key: Key | None, keys: int) -> str:
    if key is None:
        return name
    return f"{name} {key}" + (f" and {keys - 1} more" if keys > 1 else "")


def _about(**known: Any) -> dict[str, Any]:
    """Return the fields that say something."""
    return {name: value for name, value in known.items() if value}


def _meta(pid: int, tid: int, kind: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}
