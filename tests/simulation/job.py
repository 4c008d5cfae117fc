"""A whole job in virtual time: the product's own scheduler, servers, aggregators and stores; a simulated network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from simulation.network import Network, Process, SimulatedTransport, Weather
from simulation.world import Task, World

from kvstore.dist import DistStore
from kvstore.job.config import Config
from kvstore.member.session import Session
from kvstore.rule import Rule
from servers.aggregator.process import run_aggregator
from servers.server import run_scheduler, run_server

LIMIT_S = 600.0  # of virtual time: whoever has not ended by then hangs
ROOT = "inproc://scheduler"

Program = Callable[[DistStore], Any]


@dataclass
class Outcome:
    """How a run has ended.

    Attributes:
        results: what the workers' programs have returned, by rank; None for those that did not.
        errors: what ended the other workers, by rank.
        hanging: the tasks that had not ended at the limit.
        exit_codes: of the scheduler, the servers and the aggregators, by name; None for those that were killed.
        took_s: virtual seconds.
        deliveries: messages that have arrived.
        cuts: links that were cut.
        refused: messages that their receivers have refused; members send none.
        trace: the last messages.
    """

    results: list[Any]
    errors: dict[int, BaseException]
    hanging: list[str]
    exit_codes: dict[str, Any]
    took_s: float
    deliveries: int
    cuts: int
    refused: int
    trace: Callable[[], str] = field(repr=False)


class SimulatedJob:
    """One job, for one run.

    Args:
        seed: of the network.
        weather: what links are like.
        workers, servers: how many.
        hosts: the ranks of the workers of each host that has an aggregator; by default no host has one.
        rule: of the store.
        options: more, for ``Config``.

    Attributes:
        world: whose time it is.
        network: between the processes.
        processes: by name. The first task of each is what it does; others are its threads.
    """

    def __init__(
        self,
        seed: int,
        weather: Weather | None = None,
        workers: int = 2,
        servers: int = 2,
        hosts: Sequence[Sequence[int]] = (),
        rule: Rule | None = None,
        **options: Any,
    ) -> None:
        self.world = World()
        self.network = Network(self.world, seed, weather or Weather())
        self.processes: dict[str, Process] = {}
        self._rule = rule or Rule()
        self._workers, self._servers = workers, servers
        self._hosts = hosts
        self._aggregators = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
        self._options = {
            "root": ROOT,
            "num_workers": workers,
            "num_servers": servers,
            "num_aggregators": len(hosts),
            "timeout_s": 20.0,
            "patience_s": 60.0,
            "heartbeat_s": 0.5,
            "heartbeat_timeout_s": 5.0,
            **options,
        }

    def run(self, program: Program) -> Outcome:
        """Let every worker run ``program`` with its store; return how it ended."""
        tasks = {"scheduler": self._spawn("scheduler", self._schedule)}
        for rank in range(self._servers):
            tasks[f"server {rank}"] = self._spawn(f"server {rank}", partial(self._serve, rank))
        for rank in range(len(self._hosts)):
            tasks[f"aggregator {rank}"] = self._spawn(f"aggregator {rank}", partial(self._aggregate, rank))
        workers = [self._spawn(f"worker {rank}", partial(self._work, rank, program)) for rank in range(self._workers)]
        began = self.world.now
        everything = [*tasks.values(), *workers]
        self.world.run(lambda: not any(task.is_alive() for task in everything), LIMIT_S)
        hanging = [task.name for task in everything if task.is_alive()]
        outcome = Outcome(
            [task.result for task in workers],
            {rank: task.error for rank, task in enumerate(workers) if task.error is not None},
            hanging,
            {name: task.error or task.result for name, task in tasks.items()},
            self.world.now - began,
            self.network.deliveries,
            self.network.cuts,
            sum(end.refused for process in self.processes.values() for end in process.ends),
            self.network.trace,
        )
        for process in self.processes.values():
            process.kill()
        return outcome

    # ---- processes

    def _spawn(self, name: str, target: Callable[[Process], Any]) -> Task:
        process = self.processes[name] = Process(name)
        task = self._task(process, partial(target, process), name)
        task.start()
        return task

    def _task(self, process: Process, target: Callable[[], Any], name: str, daemon: bool = True) -> Task:
        task = Task(self.world, target, name)
        process.tasks.append(task)
        return task

    def _thread(self, process: Process) -> Callable[..., Any]:
        return partial(self._task, process)

    def _end(self, process: Process) -> SimulatedTransport:
        return SimulatedTransport(self.network, process)

    def _config(self, role: str, rank: int = -1) -> Config:
        return Config(role=role, rank_hint=rank, **self._options)

    def _schedule(self, process: Process) -> int:
        return run_scheduler(self._config("scheduler"), self._end(process), self.world.clock)

    def _serve(self, rank: int, process: Process) -> int:
        return run_server(
            self._config("server", rank),
            partial(self._end, process),
            f"inproc://server-{rank}",
            self.world.clock,
            self._thread(process),
        )

    def _aggregate(self, rank: int, process: Process) -> int:
        return run_aggregator(
            self._config("aggregator", rank),
            partial(self._end, process),
            f"inproc://aggregator-{rank}",
            self.world.clock,
            self._thread(process),
        )

    def _work(self, rank: int, program: Program, process: Process) -> Any:
        session = Session(
            replace(self._config("worker", rank), aggregator=self._aggregators.get(rank, -1)),
            partial(self._end, process),
            clock=self.world.clock,
            thread=self._thread(process),
        ).join()
        try:
            store = DistStore(session, f"dist_{self._rule.mode}", self._rule)
            result = program(store)
            store.close()
        except Exception as exc:  # what the end of a script tells the others
            session.leave(f"{type(exc).__name__}: {exc}")
            raise
        session.leave()
        return result
