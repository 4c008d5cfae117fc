"""The memory of servers over many rounds: it must not grow, and must stay below what the work needs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.contenders import Ours, Work
from benchmarks.figures import Curve, Result, Row, slope
from benchmarks.jobs import JobFailed
from benchmarks.networks import elements, shapes_of
from benchmarks.session import Session

ROUNDS = 200
SAMPLES = 20  # of the memory, spread over the rounds
BESIDES_MB = 300.0  # Python, torch, and what else a server needs whatever it holds
MAY_GROW_MB = 5.0  # from the middle of the rounds to their end; the beginning fills pools and caches

Sampled = list[tuple[int, list[dict[str, float]]]]


def memory(session: Session) -> None:
    """Run a job of many rounds whose rank 0 samples the servers' memory."""
    options = session.options
    rounds = options.rounds or ROUNDS
    work = Work(
        options.net or "resnet50", options.workers, options.servers, options.optimizer or "none",
        options.kind or "dist_sync", rounds,
    )  # fmt: skip
    with session.console.status(f"memory: {rounds} rounds"):
        try:
            ours = Ours(work, options.memory or "ordinary", options.transport or "auto")
            figures = ours.report(sample_every=max(1, rounds // SAMPLES))
        except JobFailed as error:
            session.fail("memory", error)
            return
    sampled: Sampled = figures["memory"]
    session.add_curve(series(sampled))
    for result in summary(sampled, allowed_mb(work)):
        session.add(result)


def allowed_mb(work: Work) -> float:
    """Return the allowed memory of a server: its share of the weights and of a round's gradients, and a constant."""
    share = 4e-6 * elements(shapes_of(work.net)) / work.servers
    return share + work.workers * share + BESIDES_MB


def series(sampled: Sampled) -> Curve:
    """Return each server's memory over the rounds, total and by kind."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for number, servers in sampled:
        for rank, kinds in enumerate(servers):
            for kind, megabytes in kinds.items():
                name = f"server {rank}" if kind == "all" else f"server {rank}, {kind}"
                lines.setdefault(name, []).append((number, megabytes))
    return Curve("memory-series", "The servers' memory", "round", "MB", lines, logarithmic=False)


def summary(sampled: Sampled, allowed: float) -> list[Result]:
    """Return the largest memory and the largest growth of a server, beside the allowed values."""
    count = len(sampled[0][1])
    totals = [[(float(number), servers[rank]["all"]) for number, servers in sampled] for rank in range(count)]
    most = [max(held for _, held in line) for line in totals]
    grown = [growth([held for _, held in line]) for line in totals]
    kilobytes = [1000 * slope(line[len(line) // 2 :]) for line in totals]
    note = "slope: " + ", ".join(f"{each:+.2f}" for each in kilobytes) + " KB a round"
    return [
        Result(
            "memory", "The most that a server held",
            [Row("largest server", [max(most)]), Row("allowed", [allowed])], ["allowed"], "MB",
        ),
        Result(
            "memory-growth", "What a server's memory grew by, from the middle of the rounds to their end",
            [Row("largest growth", [max(grown)], note), Row("allowed", [MAY_GROW_MB])], ["allowed"], "MB",
        ),
    ]  # fmt: skip


def growth(held: Sequence[float]) -> float:
    """Return the median of the last third minus that of the middle third; single samples vary within a round."""
    third = max(1, len(held) // 3)
    return statistics.median(held[-third:]) - statistics.median(held[-2 * third : -third] or held)
