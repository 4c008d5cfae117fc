"""The memory of servers over many rounds, and over a long job of every kind of work: it must not grow."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.contenders import Ours, Work, launched, program
from benchmarks.figures import Curve, Result, Row, slope
from benchmarks.jobs import TIMEOUT_S, JobFailed, run, scratch
from benchmarks.networks import elements, shapes_of
from benchmarks.session import Session

ROUNDS = 200
SAMPLES = 20  # of the memory, spread over the rounds
BESIDES_MB = 300.0  # Python, torch, and what else a server needs whatever it holds
MAY_GROW_MB = 5.0  # from the middle of the rounds to their end; the beginning fills pools and caches

SOAK_MINUTES = 12
SOAK_MAY_GROW_MB = 8.0  # from the first sixth of the time, minute 2 of 12, to its end

Sampled = list[tuple[float, list[dict[str, float]]]]


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


def soak(session: Session) -> None:
    """Run a job of rounds, keys, stores, checkpoints, saved tables, reports and evictions; ``--rounds`` are minutes."""
    options = session.options
    minutes = options.rounds or SOAK_MINUTES
    with session.console.status(f"soak: {minutes} minutes"), scratch() as folder:
        path = folder / "report"
        command = [*program("soak"), "--seconds", str(60 * minutes), "--report", str(path)]
        env = {"KVSTORE_CHECKPOINT_DIR": str(folder / "checkpoints"), "KVSTORE_CHECKPOINT_KEEP": "2"}
        try:
            job = launched(options.workers, options.servers, command, env)
            figures = run([job], path, timeout_s=60 * minutes + TIMEOUT_S)
        except JobFailed as error:
            session.fail("soak", error)
            return
    sampled: Sampled = figures["memory"]
    session.add_curve(replace(series(sampled), name="soak-series", along="second"))
    grown = [soak_growth([servers[rank]["all"] for _, servers in sampled]) for rank in range(options.servers)]
    session.add(
        Result(
            "soak", "What a server's memory grew by in a long job, from a sixth of the time to its end",
            [Row("largest growth", [max(grown)], f"{figures['units']} units"), Row("allowed", [SOAK_MAY_GROW_MB])],
            ["allowed"], "MB",
        )
    )  # fmt: skip


def soak_growth(held: Sequence[float]) -> float:
    """Return the median of the last sixth minus that of the second sixth."""
    part = max(1, len(held) // 6)
    return statistics.median(held[-part:]) - statistics.median(held[part : 2 * part] or held)


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
