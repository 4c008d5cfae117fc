"""Reports of members, of which a test says only what it is about."""

from __future__ import annotations

from typing import Any

from kvstore import wire


def worker_report(rank: int = 0, role: str = "worker", **counts: Any) -> wire.WorkerReport:
    """A worker's report; what is not given is zero."""
    zeros: dict[str, Any] = {
        **dict.fromkeys(("at", "rounds", "blocked_us", "cpu_us", "memory", "outstanding", "ahead"), 0),
        "input_us": -1,
        "sent": [],
        "received": [],
    }
    return wire.WorkerReport(wire.Node(role, rank, 1), **{**zeros, **counts})


def server_report(rank: int = 0, role: str = "server", **counts: Any) -> wire.ServerReport:
    """A server's report, or that of a standby or an aggregator; what is not given is zero, or empty."""
    zeros = dict.fromkeys(
        ("at", "rounds", "busy_us", "cpu_us", "memory", "held", "received", "sent", "waves", "oldest_us"), 0
    )
    empty: dict[str, Any] = {name: [] for name in ("came_last", "alone_us", "waiting", "missing")}
    return wire.ServerReport(wire.Node(role, rank, 1), **{**zeros, **empty, **counts})
