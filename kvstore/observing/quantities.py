"""The numbers that members report: their names, their metrics, and how they are written for people. Pure.

Text, JSON, the page and ``/metrics`` all walk ``OF_WORKERS`` and ``OF_SERVERS``: a new number is one more row there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from kvstore import wire
from kvstore.observing.view import AnyReport, MemberView, Span

Kind: TypeAlias = Literal["counter", "gauge"]
R_contra = TypeVar("R_contra", contravariant=True)

Figures: TypeAlias = dict[str, float | None]  # by the names in JSON; None for what is not known yet

MICRO = 1_000_000

UNKNOWN = "-"
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def duration(seconds: float) -> str:
    """Write a duration: ``0.4 s``, ``12 s``, ``3 min 12 s``, ``2 h 5 min``, ``3 d 4 h``."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def nbytes(count: float) -> str:
    """Write so many bytes, in powers of 1,000: ``999 B``, ``1.2 MB``."""
    unit = 0
    while abs(count) >= 999.5 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 or count >= 99.95 else f"{count:.1f} {_UNITS[unit]}"


def share(part: float) -> str:
    """Write a part of one: ``98 %``."""
    return f"{100 * part:.0f} %"


def rate(number: float) -> str:
    """Write how often something is done in a second, with three digits at most."""
    if not math.isfinite(number):
        return UNKNOWN
    return f"{number:.0f}" if number >= 99.5 else f"{number:.1f}" if number >= 9.95 else f"{number:.2f}"


def count(number: float) -> str:
    """Write a whole number."""
    return f"{number:.0f}"


def ranks(numbers: Iterable[int]) -> str:
    """Write ranks, with ranges of three or more in short: ``0, 2, 4-63``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def members(role: str, numbers: Iterable[int]) -> str:
    """Name members of one role: ``worker 3``, ``workers 0, 2, 4-63``."""
    numbers = sorted(set(numbers))
    return f"{role}{'' if len(numbers) == 1 else 's'} {ranks(numbers)}"


# ---- the table


@dataclass(frozen=True)
class Series(Generic[R_contra]):
    """A metric with one number for each member, as Prometheus reads it.

    Names and units follow Prometheus' conventions: base units, and ``_total`` for what only grows. A counter starts
    again at 0 with its member's process, as Prometheus expects of counters.
    """

    name: str  # without the prefix; of a counter, without ``_total``
    kind: Kind
    meaning: str
    read: Callable[[R_contra], float | None]


@dataclass(frozen=True)
class Quantity(Generic[R_contra]):
    """A number of each member of a role, wherever it is shown.

    Attributes:
        figure: its name in JSON; empty if it is a metric alone.
        of: gives it from a span of reports. Rates and shares are over the time between the two, and None for one.
        page: its name on the page; empty if it is not there.
        title: of its column in tables; empty if it has none.
        show: writes it.
        least, part: differences between members that are none, as ``Column`` has them.
        series: its metric; None if it follows from others.
    """

    figure: str = ""
    of: Callable[[Span[Any]], float | None] = lambda _span: None
    page: str = ""
    title: str = ""
    show: Callable[[float], str] = rate
    least: float = 0.0
    part: float = 0.0
    series: Series[R_contra] | None = None


def _rate(count: str) -> Callable[[Span[Any]], float | None]:
    return lambda span: span.rate(count) if span.seconds > 0 else None


def _share(microseconds: str) -> Callable[[Span[Any]], float | None]:
    return lambda span: max(0.0, span.rate(microseconds) / MICRO) if span.seconds > 0 else None


def _latest(name: str) -> Callable[[Span[Any]], float | None]:
    return lambda span: getattr(span.latest, name)


def _published(name: str) -> Callable[[Span[Any]], float | None]:
    """None where nothing is published."""
    return lambda span: getattr(span.latest, name) if span.latest.version else None


def _of_links(counts: str) -> Callable[[Span[Any]], float | None]:
    return lambda span: sum(span.grown(counts)) / span.seconds if span.seconds > 0 else None


def _input(span: Span[wire.WorkerReport]) -> float | None:
    """None, too, if the program does not count it."""
    return None if min(span.before.input_us, span.latest.input_us) < 0 else _share("input_us")(span)


def _series(kind: Kind, name: str, meaning: str, field: str, unit: int = 1) -> Series[Any]:
    """The metric of a field of the report, of which ``unit`` make one of the metric's."""
    return Series(name, kind, meaning, lambda report: getattr(report, field) / unit)


_counter, _gauge = partial(_series, "counter"), partial(_series, "gauge")

_ROUNDS: Series[AnyReport] = _counter(
    "rounds",
    "Of a worker, how often it has pushed its most pushed key. Of a server, the most rounds of any segment.",
    "rounds",
)
_CPU: Series[AnyReport] = _counter(
    "cpu_seconds", "Processor time that the process has used, in seconds.", "cpu_us", MICRO
)
_MEMORY: Series[AnyReport] = _gauge(
    "resident_memory_bytes", "Memory that the process occupies now, in bytes.", "memory"
)
OF_MEMBERS: tuple[Quantity[AnyReport], ...] = (
    Quantity("rounds", _latest("rounds"), "rounds", "rounds", count, 2.5, 0.01, _ROUNDS),
    Quantity("cores", _share("cpu_us"), "cores", "cores", rate, 0.5, 0.5, _CPU),
    Quantity("memory", _latest("memory"), "memory", "memory", nbytes, 1e8, 0.5, _MEMORY),
)

OF_WORKERS: tuple[Quantity[wire.WorkerReport], ...] = (
    OF_MEMBERS[0],
    Quantity("rounds_per_s", _rate("rounds"), "rate", "rounds/s", rate, 0.2, 0.2),
    Quantity(
        *("waits", _share("blocked_us"), "waiting", "waits", share, 0.25),
        series=_counter(
            "worker_blocked_seconds",
            "Seconds that the worker's program has waited for answers of servers.",
            "blocked_us",
            MICRO,
        ),
    ),
    Quantity(
        *("input", _input, "input", "input", share, 0.25),
        series=Series(
            "worker_input_seconds",
            "counter",
            "Seconds that the worker's program has waited for its next batch of data. Absent where nothing measures "
            "it.",
            lambda report: None if report.input_us < 0 else report.input_us / MICRO,
        ),
    ),
    *OF_MEMBERS[1:],
    Quantity("sent_per_s", _of_links("sent"), "sent", "sent/s", nbytes, 1e5, 0.5),
    Quantity("received_per_s", _of_links("received"), "received", "received/s", nbytes, 1e5, 0.5),
    Quantity(
        *("outstanding", _latest("outstanding"), "outstanding"),
        series=_gauge("worker_outstanding_requests", "Requests of the worker that have no answer yet.", "outstanding"),
    ),
    Quantity(
        *("ahead", _latest("ahead"), "ahead", "ahead", count, 2.5, 0.5),
        series=_gauge(
            "worker_ahead_pushes",
            "How many pushes the worker was ahead of the slowest one when it last read (its staleness).",
            "ahead",
        ),
    ),
)

OF_SERVERS: tuple[Quantity[wire.ServerReport], ...] = (
    OF_MEMBERS[0],
    Quantity("rounds_per_s", _rate("rounds"), "rate"),
    Quantity(
        *("busy", _share("busy_us"), "busy", "busy", share, 0.25, 0.5),
        series=_counter(
            "server_busy_seconds", "Seconds that the server has spent on handling messages.", "busy_us", MICRO
        ),
    ),
    *OF_MEMBERS[1:],
    Quantity(
        *("held", _latest("held"), "held", "held", nbytes, 1e6, 0.5),
        series=_gauge("server_held_bytes", "Bytes of parameters that the server holds.", "held"),
    ),
    Quantity(
        *("received_per_s", _rate("received"), "received", "received/s", nbytes, 1e5, 0.5),
        series=_counter(
            "server_received_bytes", "Bytes of gradients and values that the server has received.", "received"
        ),
    ),
    Quantity(
        *("sent_per_s", _rate("sent"), "sent", "sent/s", nbytes, 1e5, 0.5),
        series=_counter("server_sent_bytes", "Bytes of values that the server has sent.", "sent"),
    ),
    Quantity(
        *("version", _published("version"), "version", "version", count, 1.5, 0.0),
        series=_gauge(
            "server_version", "The newest version that the server has published; 0 where nothing is.", "version"
        ),
    ),
    Quantity(
        *("followers", _published("followers"), "followers", "followers", count, 100.0),
        series=_gauge("server_followers", "Readers that have asked the server for versions lately.", "followers"),
    ),
    Quantity(
        *("behind", _published("behind"), "behind", "behind", count, 10.0, 0.5),
        series=_gauge(
            "server_follower_lag_versions", "How many versions the last of these readers is behind.", "behind"
        ),
    ),
    Quantity(
        series=Series(
            "server_waiting_workers",
            "gauge",
            "Workers whose requests wait at the server now.",
            lambda report: len(report.waiting),
        )
    ),
    Quantity(
        series=Series(
            "server_missing_workers",
            "gauge",
            "Workers that requests at the server wait for now.",
            lambda report: len(report.missing),
        )
    ),
    Quantity(
        series=_gauge(
            "server_oldest_wait_seconds",
            "Seconds that the oldest request that waits at the server has waited; 0 if none waits.",
            "oldest_us",
            MICRO,
        )
    ),
)


def figures_of(member: MemberView) -> Figures | None:
    """Return the numbers of a member; None if it has made no report."""
    if member.worker is not None:
        return {each.figure: each.of(member.worker) for each in OF_WORKERS if each.figure}
    if member.server is not None:
        return {each.figure: each.of(member.server) for each in OF_SERVERS if each.figure}
    return None
