"""The metrics that come straight from members' reports: names, units and meanings. Pure.

Names and units follow Prometheus' conventions: base units, and ``_total`` for what only grows. A counter starts again
at 0 with its member's process, as Prometheus expects of counters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeAlias, TypeVar

from kvstore import wire
from kvstore.observing.view import AnyReport

Kind: TypeAlias = Literal["counter", "gauge"]
Labels: TypeAlias = Mapping[str, str]
R_contra = TypeVar("R_contra", contravariant=True)

PREFIX = "kvstore_"
MICRO = 1_000_000


@dataclass
class MetricFamily:
    """A metric and its numbers.

    Attributes:
        name: with the prefix; of a counter, without ``_total``.
        kind: whether it only grows.
        meaning: the HELP text.
        samples: labels and number of each series. No two have the same labels.
    """

    name: str
    kind: Kind
    meaning: str
    samples: list[tuple[Labels, float]] = field(default_factory=list)

    def add(self, number: float, /, **labels: str) -> None:
        """Add a series."""
        self.samples.append((labels, number))


@dataclass(frozen=True)
class Series(Generic[R_contra]):
    """A metric with one number for each member.

    Attributes:
        name: without the prefix; of a counter, without ``_total``.
        kind: whether it only grows.
        meaning: the HELP text.
        read: gives its number, or None if the report does not have it.
    """

    name: str
    kind: Kind
    meaning: str
    read: Callable[[R_contra], float | None]

    def family(self) -> MetricFamily:
        """Return the metric without numbers."""
        return MetricFamily(PREFIX + self.name, self.kind, self.meaning)


OF_MEMBERS: Sequence[Series[AnyReport]] = (
    Series(
        "rounds",
        "counter",
        "Of a worker, how often it has pushed its most pushed key. Of a server, the most rounds of any segment.",
        lambda report: report.rounds,
    ),
    Series(
        "cpu_seconds",
        "counter",
        "Processor time that the process has used, in seconds.",
        lambda report: report.cpu_us / MICRO,
    ),
    Series(
        "resident_memory_bytes",
        "gauge",
        "Memory that the process occupies now, in bytes.",
        lambda report: report.memory,
    ),
)

OF_WORKERS: Sequence[Series[wire.WorkerReport]] = (
    Series(
        "worker_blocked_seconds",
        "counter",
        "Seconds that the worker's program has waited for answers of servers.",
        lambda report: report.blocked_us / MICRO,
    ),
    Series(
        "worker_input_seconds",
        "counter",
        "Seconds that the worker's program has waited for its next batch of data. Absent where nothing measures it.",
        lambda report: None if report.input_us < 0 else report.input_us / MICRO,
    ),
    Series(
        "worker_outstanding_requests",
        "gauge",
        "Requests of the worker that have no answer yet.",
        lambda report: report.outstanding,
    ),
    Series(
        "worker_ahead_pushes",
        "gauge",
        "How many pushes the worker was ahead of the slowest one when it last read (its staleness).",
        lambda report: report.ahead,
    ),
)

OF_SERVERS: Sequence[Series[wire.ServerReport]] = (
    Series(
        "server_busy_seconds",
        "counter",
        "Seconds that the server has spent on handling messages.",
        lambda report: report.busy_us / MICRO,
    ),
    Series(
        "server_held_bytes",
        "gauge",
        "Bytes of parameters that the server holds.",
        lambda report: report.held,
    ),
    Series(
        "server_received_bytes",
        "counter",
        "Bytes of gradients and values that the server has received.",
        lambda report: report.received,
    ),
    Series(
        "server_sent_bytes",
        "counter",
        "Bytes of values that the server has sent.",
        lambda report: report.sent,
    ),
    Series(
        "server_waiting_workers",
        "gauge",
        "Workers whose requests wait at the server now.",
        lambda report: len(report.waiting),
    ),
    Series(
        "server_missing_workers",
        "gauge",
        "Workers that requests at the server wait for now.",
        lambda report: len(report.missing),
    ),
    Series(
        "server_oldest_wait_seconds",
        "gauge",
        "Seconds that the oldest request that waits at the server has waited; 0 if none waits.",
        lambda report: report.oldest_us / MICRO,
    ),
)
