"""A job in virtual time whose processes are killed, stopped and continued in an order, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from faults.orders import Order, Step
from simulation.job import SimulatedJob
from simulation.launcher import Supervision
from simulation.network import Process, Weather
from simulation.world import Task

from kvstore import wire
from kvstore.client import DistStore

LIMIT_S = 2.0  # of the heartbeat
SEEN_S = 1.0  # in which the scheduler knows of a loss
HEAL_S = 30.0  # in which all ranks are in step again, even if launch.py waits longer, for deaths in a row
MOST_S = 200.0  # of a run
REST_S = 0.5  # of a worker between two rounds
SIZE = 2000  # elements, cut over both servers


class Ordered:
    """One run.

    Args:
        order: what happens to its processes.
        seed: of the network.
        weather: of its links.
        hosts: the ranks of the workers of each host that has an aggregator.

    Attributes:
        verdict: what is wrong with how it has ended; empty if nothing is.
        trace: the last messages.
    """

    def __init__(self, order: Order, seed: int, weather: Weather, hosts: tuple[tuple[int, ...], ...] = ()) -> None:
        self._order = order
        self._done = False
        self._job = SimulatedJob(
            seed,
            weather,
            workers=4 if hosts else 2,
            hosts=hosts,
            replicas=1,
            restarts=100,
            supervised=True,
            bigarray_bound=1000,
            heartbeat_s=LIMIT_S / 5,
            heartbeat_timeout_s=LIMIT_S,
        )
        self._views: dict[int, wire.View] = {}  # the latest of each rank
        self._note, self._job.network.note = self._job.network.note, self._look  # type: ignore[method-assign]
        happening = Task(self._job.world, self._happen, "what happens")
        self._job.world.after(1.0, happening.start)
        outcome = self._job.run(self._train, MOST_S)
        if happening.error is not None:
            raise happening.error
        self.trace = outcome.trace
        self.verdict = self._judge(outcome.results, outcome.hanging)

    def _train(self, store: DistStore) -> int:
        """Train until nothing more is to happen; each value must be exact."""
        task = self._job.world.current
        assert task is not None
        weight, end = torch.zeros(SIZE), torch.zeros(1)
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init(["weight", "end"], [weight, end])
        rounds = 0
        while not end.any():
            last = float(self._done and store.rank == 0)
            store.pushpull(["weight", "end"], [torch.full((SIZE,), 1.0), torch.full((1,), last)], [weight, end])
            rounds += 1
            assert (weight == -store.num_workers * rounds).all()
            task.wait(REST_S)
        return rounds

    def _happen(self) -> None:
        task = self._job.world.current
        assert task is not None
        stopped: dict[str, Process] = {}
        for step in self._order.steps:
            self._step(step, task, stopped)
        self._done = not self._order.code

    def _step(self, step: Step, task: Task, stopped: dict[str, Process]) -> None:
        if step.action == "kill":
            self._job.world.after(0.0, lambda: self._job.kill(step.member))  # whose end leads back to the hub
            task.wait(0.0)
        elif step.action == "stop":
            stopped[step.member] = self._job.processes[step.member]
            stopped[step.member].stop()
        elif step.action == "cont":
            stopped[step.member].resume()
        elif step.action == "pass":
            task.wait(step.limits * LIMIT_S)
        else:
            until, healed = self._job.world.now + HEAL_S, 0.0
            while healed < SEEN_S:
                assert self._job.world.now < until, "a rank has not healed"
                task.wait(0.1)
                well = all(view.synced for view in self._views.values())
                well = well and not any(process.dead for process in self._job.processes.values())
                healed = healed + 0.1 if well else 0.0

    def _look(self, source: str, target: str, frames: Sequence[wire.Buffer] | None) -> None:
        """Note a message, and what it says of who serves."""
        self._note(source, target, frames)
        if source == "scheduler" and frames:
            message = wire.decode([bytes(frame) for frame in frames])
            if isinstance(message, wire.View):
                self._views[message.primary.rank] = message

    def _judge(self, results: list[Any], hanging: list[str]) -> str:
        supervision = self._job.launcher
        assert isinstance(supervision, Supervision)
        failure, code = supervision.ending.failure, supervision.ending.exit_code
        said = "" if failure is None else f"{supervision.tasks[failure.index].name} {failure.how}"
        if hanging or not supervision.ending.over:
            return f"these hang: {hanging}"
        if code != self._order.code:
            return f"the exit code is {code} and not {self._order.code}: {said}"
        if not code:
            return "" if None not in results else f"workers have not finished: {results}"
        named = "" if failure is None else supervision.tasks[failure.index].name
        wanted = self._order.blamed
        return "" if named in wanted or not wanted else f"{said}, and it was {' or '.join(sorted(wanted))}"
