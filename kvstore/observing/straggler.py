"""Which worker holds up all others, and by what. Pure: two reports of each member in, a finding out.

A worker is a straggler if, since the earlier reports,

- it came last in at least ``LAST`` of at least ``FEWEST_WAVES`` waves, and
- others waited for it alone for at least ``ALONE`` of the time, and for at least ``ALONE_S`` a round, and
- others have been held up by that: half of them have waited for at least ``HELD_UP`` of the time.

In even runs somebody comes last, too, and it may often be the same worker. But then nobody waits long for it alone. In
very short rounds, requests come in the order in which the requests before them were answered: that is why a wait has to
be worth ``ALONE_S``. Servers see the workers of an aggregator as one. The aggregator's own counts then say which of
them the others of the host wait for. If these do not single one out, all of them are named.

The cause follows from how the time of the straggler differs from that of half of the others (their median):

- It waits for answers less than they do, and the difference is more than half of the time that they wait for it. Then
  its own process is busy. The cause is ``input`` if it waits for data longer than they do, by at least half of that
  difference, and ``compute`` if it does not. If nobody has counted the time for data, it is ``local``, one of the two.
- Otherwise it waits as they do. They wait for messages that it has sent already: the cause is ``network``.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvstore import wire
from kvstore.observing.view import Span

LAST = 0.8  # of the waves
ALONE = 0.1  # of the time
ALONE_S = 0.002  # a round
HELD_UP = 0.05  # of the time
FEWEST_WAVES = 20  # with fewer, an even run of few workers might look the same
SHORTEST_S = 2.0  # between two reports

MICRO = 1e-6
CAUSES = ("compute", "input", "network", "local")


@dataclass(frozen=True)
class Straggler:
    """A worker, or the workers of one host, for which all others wait.

    Attributes:
        ranks: of the worker; several only if they share an aggregator.
        seconds: how long the time is that the numbers are about.
        waves: how many there were.
        last: in which part of them it came last.
        alone: the part of the time in which others have waited for it alone.
        alone_s: the seconds a round of that.
        blocked, others_blocked: the part of the time in which it, and half of the others, have waited for answers.
        input, others_input: likewise for data; None if nobody has counted.
        cause: ``compute``, ``input``, ``network``, or ``local`` if it is one of the first two.
    """

    ranks: tuple[int, ...]
    seconds: float
    waves: int
    last: float
    alone: float
    alone_s: float
    blocked: float
    others_blocked: float
    input: float | None
    others_input: float | None
    cause: str


@dataclass(frozen=True)
class _Awaited:
    """The workers that others wait for, as some processes have seen it; see ``Straggler``."""

    ranks: tuple[int, ...]
    seconds: float
    waves: int
    last: float
    alone: float


def find_straggler(
    workers: Mapping[int, Span[wire.WorkerReport]],
    servers: Sequence[Span[wire.ServerReport]],
    aggregators: Sequence[Span[wire.ServerReport]] = (),
    alone: float = ALONE,
    fewest_waves: int = FEWEST_WAVES,
) -> Straggler | None:
    """None if too little is known. Others must have waited for it ``alone`` in this part of the time."""
    awaited = _awaited(servers, alone, fewest_waves)
    if awaited is None and len(aggregators) == 1:  # all workers are on one host: to servers they are one
        awaited = _awaited(aggregators, alone, fewest_waves)
    elif awaited is not None and len(awaited.ranks) > 1:
        awaited = _within(awaited, aggregators, alone, fewest_waves)
    if awaited is None or not set(awaited.ranks) <= workers.keys():
        return None
    return _judged(awaited, workers)


def _judged(awaited: _Awaited, workers: Mapping[int, Span[wire.WorkerReport]]) -> Straggler | None:
    """Return the straggler with the cause; None if nobody is held up by it."""
    own = [workers[rank] for rank in awaited.ranks]
    others = [span for rank, span in workers.items() if rank not in awaited.ranks and span.seconds >= SHORTEST_S]
    rounds = max(span.rate("rounds") for span in own)
    if not others or not rounds:
        return None
    blocked, others_blocked = (statistics.median(map(blocked_share, spans)) for spans in (own, others))
    alone_s = awaited.alone / rounds
    if others_blocked < HELD_UP or alone_s < ALONE_S:
        return None
    input_share, others_input = _median(map(input_share_of, own)), _median(map(input_share_of, others))
    return Straggler(
        awaited.ranks,
        awaited.seconds,
        awaited.waves,
        awaited.last,
        awaited.alone,
        alone_s,
        blocked,
        others_blocked,
        input_share,
        others_input,
        _cause(awaited.alone, others_blocked - blocked, input_share, others_input),
    )


def _cause(alone: float, busier: float, input_share: float | None, others_input: float | None) -> str:
    """Return the cause, of a worker that has waited for answers less than others by ``busier`` of the time."""
    if busier < alone / 2:
        return "network"
    if input_share is None:
        return "local"
    return "input" if input_share - (others_input or 0.0) >= min(alone, busier) / 2 else "compute"


def _awaited(seen: Sequence[Span[wire.ServerReport]], alone: float, fewest_waves: int) -> _Awaited | None:
    """Return the workers that others wait for at the processes of ``seen``; None for none."""
    spans = [span for span in seen if span.seconds >= SHORTEST_S and span.latest.waves > span.before.waves]
    waves = sum(span.latest.waves - span.before.waves for span in spans)
    if waves < fewest_waves:
        return None
    came_last: dict[int, int] = {}
    for span in spans:
        for rank, count in enumerate(span.grown("came_last")):
            came_last[rank] = came_last.get(rank, 0) + count
    ranks = tuple(rank for rank, count in came_last.items() if count >= LAST * waves)
    if not ranks:
        return None
    # The most at one server, not the sum over servers: they wait for the same worker at the same time.
    share = max(alone_share(span, rank) for span in spans for rank in ranks)
    if share < alone:
        return None
    seconds = max(span.seconds for span in spans)
    return _Awaited(ranks, seconds, waves, came_last[ranks[0]] / waves, share)


def _within(
    awaited: _Awaited, aggregators: Sequence[Span[wire.ServerReport]], alone: float, fewest_waves: int
) -> _Awaited:
    """Return which of the workers that are one to servers the others of their host wait for; else all of them."""
    for span in aggregators:
        one = _awaited([span], alone, fewest_waves)
        # An aggregator of another host may have a straggler of its own, for which nobody outside that host waits.
        if one is not None and len(one.ranks) == 1 and one.ranks[0] in awaited.ranks:
            return one
    return awaited


def alone_share(span: Span[wire.ServerReport], rank: int) -> float:
    """The part of the time in which others have waited for worker ``rank`` alone."""
    grown = span.grown("alone_us")
    return MICRO * grown[rank] / span.seconds if rank < len(grown) and span.seconds else 0.0


def blocked_share(span: Span[wire.WorkerReport]) -> float:
    return min(1.0, MICRO * span.rate("blocked_us"))


def input_share_of(span: Span[wire.WorkerReport]) -> float | None:
    """The part of the time in which a worker has waited for data; None if nobody has counted."""
    if span.before.input_us < 0 or span.latest.input_us < 0:
        return None
    return min(1.0, MICRO * span.rate("input_us"))


def _median(shares: Iterable[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return statistics.median(known) if known else None


# ---- looks at the straggler and at another worker

ENOUGH = 20  # looks, before they say anything
MORE = 0.05  # of the looks at the straggler that something must explain beyond those at the other


class PairedLooks:
    """What repeated looks at a straggler and at another worker, at the same moments, say of the straggler's time.

    Both do the same work. So what the straggler is found at more often than the other is what takes it longer: the
    reading of input, computation, or a line of its program that is neither.
    """

    def __init__(self, rank: int, other: int) -> None:
        self.rank = rank
        self.other = other
        self.count = 0
        self._doing: dict[int, Counter[str]] = {rank: Counter(), other: Counter()}
        self._places: dict[int, Counter[str]] = {rank: Counter(), other: Counter()}

    def add(self, seen: wire.Stacks, other: wire.Stacks) -> None:
        self.count += 1
        for rank, stacks in ((self.rank, seen), (self.other, other)):
            doing = doing_of(stacks)
            self._doing[rank][doing] += 1
            if doing != "waits":
                self._places[rank][stacks.place] += 1

    @property
    def cause(self) -> str:
        """``input`` or ``compute``, if that takes the straggler longer; empty if it is neither, or not known yet."""
        if self.count < ENOUGH:
            return ""
        excess = {doing: self._excess(self._doing, doing) for doing in ("input", "compute", "else")}
        doing = max(excess, key=lambda name: excess[name])
        return doing if doing != "else" and excess[doing] >= MORE * self.count else ""

    @property
    def words(self) -> str:
        """Where the straggler was found more often than the other, with the numbers; empty if that is nowhere."""
        places = self._places[self.rank]
        place = max(places, key=lambda name: self._excess(self._places, name), default="")
        if not place or self.count < ENOUGH or self._excess(self._places, place) < MORE * self.count:
            return ""
        others = self._places[self.other][place]
        beside = f", and {others} found worker {self.other} there" if others else ""
        return f"{places[place]} of {self.count} looks found it at {place}{beside}"

    def _excess(self, counts: dict[int, Counter[str]], name: str) -> int:
        return counts[self.rank][name] - counts[self.other][name]


def doing_of(stacks: wire.Stacks) -> str:
    """Return what the program's own thread does: ``input``, ``compute``, ``waits`` in a store, or ``else``.

    It reads input if it is inside ``torch.utils.data``, whatever is called from there. It computes if its innermost
    frame that is torch's or ours is torch's.
    """
    frames: list[str] = stacks.threads[0][1] if stacks.threads else []
    if any(frame.startswith("torch/utils/data/") for frame in frames):
        return "input"
    for frame in reversed(frames):
        if frame.startswith("kvstore/"):
            return "waits"
        if frame.startswith("torch/"):
            return "compute"
    return "else"
