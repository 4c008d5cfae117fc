"""What holds a job up, by rules that show their numbers. Pure: a view of a job in, advice out.

Each rule is about the time between two reports of each member, some seconds. All numbers are parts of that time.
Workers and servers count by their median, so that one alone does not decide.

- ``straggler_compute``, ``straggler_input``, ``straggler_network``, ``straggler_local``: one worker holds up all
  others. The rule is in ``kvstore.observing.straggler``.
- ``stuck``: a request waits, for ``STUCK_S`` by now.
- ``uneven_servers``: workers wait for answers, for ``WAITS`` of the time, while one server handles messages for
  ``BUSIER`` of it, ``UNEVEN`` times as long as the others.
- ``bound_by_store``: likewise, for ``BUSY`` of it, and the others are as busy.
- ``bound_by_network``: workers wait for ``MOST`` of the time, and no server is busy: messages are under way.
- ``bound_by_input``: workers wait for data for ``INPUT`` of the time, as far as they count that.

The rules about the whole job are asked only if nobody holds it up alone. No advice means that none of this is so.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore import wire
from kvstore.job.contract import member_name
from kvstore.observing.quantities import ranks, share
from kvstore.observing.straggler import (
    CAUSES,
    MICRO,
    SHORTEST_S,
    Straggler,
    blocked_share,
    find_straggler,
    input_share_of,
)
from kvstore.observing.view import JobView, MemberView, Span

STUCK_S = 10.0
WAITS = 0.3
MOST = 0.6
BUSY = 0.5
BUSIER = 0.3
UNEVEN = 2.0
INPUT = 0.2

KINDS = (
    *(f"straggler_{cause}" for cause in CAUSES),
    "stuck",
    "uneven_servers",
    "bound_by_store",
    "bound_by_network",
    "bound_by_input",
)
SEVERITIES = ("info", "warning", "error")
SHOWN_BY = "kvstore-status --stacks shows where"  # how to find out what nobody has seen yet


@dataclass(frozen=True)
class Advice:
    """One finding.

    Attributes:
        kind: one of ``KINDS``.
        role, rank: of the member that it is about; empty and -1 for the whole job.
        text: a sentence or two, with the numbers that it follows from. Plain: the page would show marks as they are.
        severity: one of ``SEVERITIES``.
    """

    kind: str
    role: str
    rank: int
    text: str
    severity: str = "warning"

    @property
    def about(self) -> str:
        return member_name(self.role, self.rank) if self.role else ""

    @property
    def straggler(self) -> bool:
        return self.kind.startswith("straggler_")


def advise(view: JobView) -> list[Advice]:
    """Return what holds the job up, the worst first; empty if nothing does, or too little is known."""
    workers, servers, aggregators = at_work(view)
    stuck = _stuck(view)
    straggler = find_straggler(workers, servers, aggregators)
    if straggler is not None:
        # The rules about the whole job would follow from it: while all wait for one worker, no server is busy.
        return [*stuck, of_straggler(straggler)]
    return [*stuck, *_of_job(workers, view)]


def at_work(
    view: JobView,
) -> tuple[dict[int, Span[wire.WorkerReport]], list[Span[wire.ServerReport]], list[Span[wire.ServerReport]]]:
    """The reports of workers, by rank, of servers and of aggregators, as far as they are ready."""
    ready = [member for member in view.members if member.state == "ready"]
    workers = {member.rank: member.worker for member in ready if member.worker is not None}
    servers = [member.server for member in ready if member.server is not None and member.role != "aggregator"]
    aggregators = [member.server for member in ready if member.server is not None and member.role == "aggregator"]
    return workers, servers, aggregators


def of_straggler(found: Straggler, seen: str = "") -> Advice:
    """``seen``: where the straggler was found in its code, in words; empty if nobody has looked."""
    one = len(found.ranks) == 1
    who = f"{names_of(found)} is slow: it" if one else f"{names_of(found)}, which share an aggregator, are slow: they"
    text = (
        f"{who} came last in {share(found.last)} of the rounds of the last {found.seconds:.0f} s, and others waited "
        f"for {'it' if one else 'them'} alone for {share(found.alone)} of the time ({_millis(found.alone_s)} a round). "
        f"{_why(found)}"
    )
    if not seen and found.cause == "local":
        seen = SHOWN_BY
    return Advice(f"straggler_{found.cause}", "worker", found.ranks[0], text + (f". {seen}" if seen else ""))


def names_of(found: Straggler) -> str:
    """As sentences call it: ``worker 1``, ``workers 2 and 3``."""
    *most, last = map(str, found.ranks)
    return f"workers {', '.join(most)} and {last}" if most else f"worker {last}"


def _why(found: Straggler) -> str:
    one = len(found.ranks) == 1
    it, its, ends = ("it", "its", "s") if one else ("they", "their", "")
    others = "the others"
    waits = (
        f"{it} wait{ends} for answers for {share(found.blocked)} of the time, {others} {share(found.others_blocked)}"
    )
    reads = ""
    if found.input is not None:
        known = "" if found.others_input is None else f", {others} {share(found.others_input)}"
        reads = f"{it} wait{ends} for data for {share(found.input)} of the time{known}"
    if found.cause == "network":
        return f"{its.capitalize()} messages take long to arrive, so look at {its} network: {waits}"
    if found.cause == "input":
        return f"{it.capitalize()} read{ends} {its} input for longer than {others}: {reads or waits}"
    if found.cause == "compute":
        return f"{it.capitalize()} compute{ends} for longer than {others}: {waits}{f', and {reads}' if reads else ''}"
    return f"{it.capitalize()} compute{ends}, or read{ends} {its} input, for longer than {others}: {waits}"


def _stuck(view: JobView) -> list[Advice]:
    """Return the longest wait of all, if it is very long."""
    waiting = [member for member in view.members if member.state == "ready" and member.server is not None]
    late = [(member.server.latest.oldest_us, member) for member in waiting if member.server is not None]
    longest, member = max(late, key=lambda entry: entry[0], default=(0, None))
    if member is None or member.server is None or longest * MICRO < STUCK_S:
        return []
    report = member.server.latest
    about = ("worker", report.missing[0]) if len(report.missing) == 1 else ("", -1)
    who = _listed(report.waiting)
    return [Advice("stuck", *about, f"{who} waited for {longest * MICRO:.0f} s so far: {member.title} {report.why}")]


def _of_job(workers: dict[int, Span[wire.WorkerReport]], view: JobView) -> list[Advice]:
    spans = [span for span in workers.values() if span.seconds >= SHORTEST_S and span.rate("rounds") > 0]
    servers = [member for member in view.of_role("server") + view.of_role("standby") if _works(member)]
    found: list[Advice] = []
    if not spans:
        return found
    # Medians: one member alone must not decide what is said of the whole job.
    waits = statistics.median(map(blocked_share, spans))
    busy = {member.rank: _busy(member) for member in servers}
    if busy and waits >= WAITS:
        found += _of_servers(waits, busy)
    inputs = [part for span in spans if (part := input_share_of(span)) is not None]
    reads = statistics.median(inputs) if inputs else 0.0
    if reads >= INPUT:
        text = (
            f"workers wait for data for {share(reads)} of the time: load it in more processes (num_workers of "
            "DataLoader), prepare it beforehand, or keep it closer"
        )
        found.append(Advice("bound_by_input", "", -1, text))
    return found


def _of_servers(waits: float, busy: dict[int, float]) -> list[Advice]:
    busiest = max(busy, key=lambda rank: busy[rank])
    others = [part for rank, part in busy.items() if rank != busiest]
    usual = statistics.median(others) if others else 0.0
    most = busy[busiest]
    start = f"workers wait for answers for {share(waits)} of the time"
    if most >= BUSIER and others and most >= UNEVEN * usual:
        text = (
            f"{start}; server {busiest} is busy for {share(most)}, half of the others for {share(usual)}: it has "
            "more to do, or a slower machine. Large keys are cut across all servers above KVSTORE_BIGARRAY_BOUND"
        )
        return [Advice("uneven_servers", "server", busiest, text)]
    if most >= BUSY:
        text = (
            f"{start}; servers are busy for up to {share(most)}: more servers (-s), smaller messages "
            "(set_gradient_compression), or an aggregator on each host take work from them"
        )
        return [Advice("bound_by_store", "", -1, text)]
    if waits >= MOST:
        text = (
            f"{start}, and servers are busy for {share(most)} at most: messages are under way, or processors are busy "
            "with other things. Smaller messages (set_gradient_compression) and fewer calls with more keys each help"
        )
        return [Advice("bound_by_network", "", -1, text, "info")]
    return []


def _works(member: MemberView) -> bool:
    span = member.server
    return member.state == "ready" and span is not None and span.seconds >= SHORTEST_S and span.rate("received") > 0


def _busy(member: MemberView) -> float:
    span: Span[wire.ServerReport] | None = member.server
    return 0.0 if span is None else min(1.0, MICRO * span.rate("busy_us"))


def _listed(waiting: Sequence[int]) -> str:
    if len(waiting) == 1:
        return f"worker {waiting[0]} has"
    return f"workers {ranks(waiting)} have" if waiting else "requests have"


def _millis(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"
