"""A simulated job: views of it at any time, without a scheduler."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore import wire
from kvstore.observing.view import Event, JobView, MemberView, Span

SPAN_S = 10.0


@dataclass
class SimulatedJob:
    """A job in which every round takes as long as its slowest worker.

    Args:
        workers, servers: how many there are.
        round_s: how long a round takes.
        straggler: the worker that is awaited; -1 for none.
        killed: the worker that is lost; -1 for none.
    """

    workers: int = 64
    servers: int = 16
    round_s: float = 0.1
    straggler: int = -1
    killed: int = -1
    started: float = 1000.0
    seed: random.Random = field(default_factory=lambda: random.Random(3))

    def view(self, age: float) -> JobView:
        members = [self._worker(rank, age) for rank in range(self.workers)]
        members += [self._server(rank, age) for rank in range(self.servers)]
        events = [(0.4, f"all {self.workers} workers and {self.servers} servers have joined")]
        if self.killed >= 0:
            events.append((age, f"worker {self.killed} was lost: killed by SIGKILL"))
        return JobView(
            self.started + age,
            self.started,
            self.workers,
            self.servers,
            0,
            0,
            members,
            None,
            "",
            [Event(number, self.started + at, text) for number, (at, text) in enumerate(events, 1)],
        )

    def _worker(self, rank: int, age: float) -> MemberView:
        state = "lost" if rank == self.killed else "ready"
        before, latest = (self._worker_report(rank, max(0.5, at)) for at in (age - SPAN_S, age))
        return MemberView("worker", rank, 1, state, 0.2, "", Span(before, latest))

    def _worker_report(self, rank: int, age: float) -> wire.WorkerReport:
        rounds = int(age / self.round_s)
        waits = 0.05 if rank == self.straggler else 0.2 + 0.02 * (rank % 7) + (0.4 if self.straggler >= 0 else 0)
        each = [int(age * 2e5 * (1 + (rank + server) % 5 / 4)) for server in range(self.servers)]
        return wire.WorkerReport(
            wire.Node("worker", rank, 1),
            self.started + age,
            rounds,
            int(age * waits * 1e6),
            int(age * 4e4),
            int(age * 0.9e6),
            400_000_000 + rank * 1_000_000 + int(age * 500),
            2,
            rank % 3,
            each,
            each,
            [
                ["loss", 2.3 * math.exp(-age / 900) + 0.1],
                ["accuracy", 1 - 0.9 * math.exp(-age / 900)],
                ["epoch", age // 60],
            ],
        )

    def _server(self, rank: int, age: float) -> MemberView:
        before, latest = (self._server_report(rank, max(0.5, at)) for at in (age - SPAN_S, age))
        return MemberView("server", rank, 1, "ready", 0.3, f"ipc://server-{rank}", None, Span(before, latest))

    def _server_report(self, rank: int, age: float) -> wire.ServerReport:
        waves = int(age / self.round_s)
        last = [waves if worker == self.straggler else waves // max(1, self.workers) for worker in range(self.workers)]
        waits = self.straggler >= 0
        return wire.ServerReport(
            wire.Node("server", rank, 1),
            self.started + age,
            waves,
            int(age * (1.5e5 + rank * 1e4)),
            int(age * 2e5),
            300_000_000 + rank * 2_000_000,
            25_000_000 + rank * 400_000,
            int(age * 1.2e7),
            int(age * 1.2e7),
            waves,
            last,
            [int(each * self.round_s * 4e5) if worker == self.straggler else 0 for worker, each in enumerate(last)],
            [worker for worker in range(self.workers) if worker != self.straggler] if waits else [],
            [self.straggler] if waits else [],
            40_000 if waits else 0,
            f"round {waves} of 'layer1.weight' lacks the push of worker {self.straggler}" if waits else "",
        )


@dataclass
class SimulatedSession:
    """A session of an observer with it, in which every look is at one time later.

    Args:
        job: the job.
        now: how old the job is.
    """

    job: SimulatedJob
    now: Callable[[], float]
    woken: threading.Event = field(default_factory=threading.Event)

    def look(self) -> JobView:
        return self.job.view(self.now())

    def wait(self, seconds: float) -> None:
        self.woken.wait(seconds)
        self.woken.clear()

    def wake(self) -> None:
        self.woken.set()

    def close(self) -> None:
        pass
