"""Thousands of workers without their processes: what each message costs, and what a round takes by the model."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.cores import Step, median_us
from benchmarks.crowd import Crowd, SimulatedJob
from benchmarks.figures import Result, Row
from benchmarks.networks import shapes_of
from benchmarks.round_model import table
from benchmarks.session import Session
from servers.processes import collect_seldom

HOSTS, WORKERS_PER_HOST = 512, 8


def cluster(session: Session) -> None:
    """Run the cores of all sizes that the options ask for, then print the model."""
    options = session.options
    for hosts in options.hosts or (HOSTS,):
        for workers in options.workers_per_host or (WORKERS_PER_HOST,):
            for aggregated in (True, False) if workers > 1 else (False,):
                shapes = shapes_of(options.net or "resnet50")
                measure(session, Crowd(hosts, workers, options.servers, shapes, aggregated))
    session.console.print("\n".join(table()), markup=False, highlight=False)


def measure(session: Session, crowd: Crowd) -> None:
    """Run one job's scheduler, all its servers and one of its aggregators."""
    collect_seldom(crowd.workers)  # as their processes do
    job = SimulatedJob(crowd)
    size = f"{crowd.hosts} hosts of {crowd.workers_per_host} workers, {crowd.servers} servers"
    title = f"{size}, {'one contribution a host' if crowd.aggregated else 'no aggregation'}"
    with session.console.status(title):
        steps, placed = job.schedule()
        rows = [Row(f"scheduler: {step.name}", step.each, step.words) for step in steps]
        if crowd.aggregated:
            rows += [Row(f"an aggregator: {step.name}", step.each, step.words) for step in job.aggregate(placed)]
        served = [job.serve(number, parcels) for number, parcels in enumerate(job.parcels(placed)) if parcels]
        rows += [row_of(alike) for alike in zip(*served, strict=True)]
        held = [Row(role, [megabytes]) for role, megabytes in job.held_mb().items()]
    name = f"cluster-{crowd.hosts}x{crowd.workers_per_host}" + ("" if crowd.aggregated else "-flat")
    session.add(Result(name, f"{title}: processor time of a message", rows, unit="us"))
    session.add(Result(f"{name}-memory", f"{title}: the most that objects took", held, unit="MB"))


def row_of(steps: Sequence[Step]) -> Row:
    """Return the same step of all servers."""
    messages, sent = sum(len(step.each) for step in steps), sum(step.sent for step in steps)
    note = (
        f"{messages:,} messages in, {sent:,} out; decisions {sum(step.decisions_s for step in steps):.3f} s of all, "
        f"{max(step.decisions_s for step in steps):.3f} s of the busiest; "
        f"with decoding and encoding {max(step.all_s for step in steps):.3f} s; "
        f"the longest {max(max(step.each) for step in steps) / 1e3:.1f} ms"
    )
    return Row(f"servers: {steps[0].name}", [median_us(steps)], note)
