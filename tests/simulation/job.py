"""A whole job in virtual time: the product's own scheduler, servers, aggregators and stores; a simulated network.

With replicas or restarts it has what ``launch.py`` does for a job: who dies is reported to the scheduler, and servers,
standbys and the scheduler are started again.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import handed_over
from simulation.launcher import SimulatedLauncher, Supervision
from simulation.network import Network, Process, Weather
from simulation.transport import SimulatedTransport
from simulation.world import Task, World

from kvstore.client import DistStore
from kvstore.job import exit_report
from kvstore.job.config import Config
from kvstore.job.exit_report import ExitReport
from kvstore.job.processes import Exit
from kvstore.job.tracebacks import reported
from kvstore.member.session import Session
from kvstore.rule import Rule
from servers.processes import run_member
from servers.scheduler_process import run_scheduler

LIMIT_S = 600.0  # of virtual time: whoever has not ended by then hangs
HEARTBEAT_LIMIT_S = 5.0
ROOT = "inproc://scheduler"
SERVING = ("server", "standby")
RESTARTED = (*SERVING, "scheduler")
REAP_S = 0.01

Program = Callable[[DistStore], Any]


@dataclass
class Outcome:
    """How a run has ended.

    Attributes:
        results: what the workers' programs have returned, by rank; None for those that did not.
        errors: what ended the other workers, by rank.
        hanging: the tasks that had not ended at the limit.
        exit_codes: of the scheduler, the servers and the aggregators, by name; None for those that were killed. If one
            was started several times, that of the last.
        took_s: virtual seconds.
        worked_s: the same, until the last worker had ended.
        deliveries: messages that have arrived.
        cuts: links that were cut.
        refused: messages that their receivers have refused; members send none.
        starts: how often each member was started, by name.
        welcomed: after how many deliveries all had joined; None if they have not.
        trace: the last messages.
    """

    results: list[Any]
    errors: dict[int, BaseException]
    hanging: list[str]
    exit_codes: dict[str, Any]
    took_s: float
    worked_s: float
    deliveries: int
    cuts: int
    refused: int
    starts: dict[str, int]
    welcomed: int | None
    trace: Callable[[], str] = field(repr=False)


class SimulatedJob:
    """One job, for one run.

    Args:
        seed: of the network.
        weather: what links are like.
        workers, servers: how many.
        hosts: the ranks of the workers of each host that has an aggregator; by default no host has one.
        rule: of the store.
        replicas: 1 to give each server a standby.
        shares: whether standbys are handed what updates have made, now and then.
        start_s: how long a process that is started again takes to run, on average.
        restarts: how often dead servers, standbys and schedulers are started again, all together.
        reaped: whether the launcher sees at once who has ended; else the scheduler notices who is silent. By default
            only with restarts.
        returns: whether dead workers are started again, too.
        supervised: whether the supervision of ``launch.py`` decides when and how the job ends, and who is to blame.
        options: more, for ``Config``.
    """

    def __init__(
        self,
        seed: int,
        weather: Weather | None = None,
        workers: int = 2,
        servers: int = 2,
        hosts: Sequence[Sequence[int]] = (),
        rule: Rule | None = None,
        replicas: int = 0,
        restarts: int = 0,
        start_s: float = 0.05,
        shares: bool = False,
        reaped: bool | None = None,
        returns: bool = False,
        supervised: bool = False,
        **options: Any,
    ) -> None:
        self.world = World()
        self.network = Network(self.world, seed, weather or Weather())
        self.network.shares = shares
        self.processes: dict[str, Process] = {}
        self.everyone: list[Process] = []
        self.starts: Counter[str] = Counter()
        self._roles = SERVING if replicas else SERVING[:1]
        self._working: list[Task] = []  # the latest of each worker
        self._program: Program = lambda _: None
        self._worked_at = self.world.now
        # A scheduler that may be started again has a log.
        self._directory = TemporaryDirectory(prefix="simulated-") if restarts else None
        self.launcher = (Supervision if supervised else SimulatedLauncher)(
            self.network,
            self.processes,
            ROOT,
            REAP_S if (restarts if reaped is None else reaped) else 2 * HEARTBEAT_LIMIT_S,
            restarts,
            start_s,
            (*(RESTARTED if replicas or not returns else ()), *(("worker",) if returns else ())),
            self._start,
            lambda: self.working,
        )
        self._rule = rule or Rule()
        self._workers, self._servers = workers, servers
        self._hosts = hosts
        self._aggregators = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
        self._options = {
            "root": ROOT,
            "num_workers": workers,
            "num_servers": servers,
            "num_aggregators": len(hosts),
            **({"replicas": replicas} if replicas else {}),
            "timeout_s": 20.0,
            "patience_s": 60.0,
            "heartbeat_s": 0.5,
            "heartbeat_timeout_s": HEARTBEAT_LIMIT_S,
            **options,
        }

    def run(self, program: Program, limit_s: float = LIMIT_S) -> Outcome:
        names = ["scheduler"]
        names += [f"{role} {rank}" for role in SERVING for rank in range(self._servers) if role in self._roles]
        names += [f"aggregator {rank}" for rank in range(len(self._hosts))]
        for name in names:
            self._start(name)
        self._program = program
        for rank in range(self._workers):
            self._start(f"worker {rank}")
        began = self.world.now
        with handed_over.soon(), mock.patch.object(exit_report, "hand_over", self._hand_over):
            self.world.run(lambda: self.launcher.over(bool(self.alive)), limit_s)
        hanging = [task.name for task in self.alive]
        tasks = {name: self.processes[name].tasks[0] for name in names}
        outcome = Outcome(
            [task.result for task in self._working],
            {rank: task.error for rank, task in enumerate(self._working) if task.error is not None},
            hanging,
            {name: task.error or task.result for name, task in tasks.items()},
            self.world.now - began,
            self._worked_at - began,
            self.network.deliveries,
            self.network.cuts,
            sum(end.refused for process in self.everyone for end in process.ends),
            dict(self.starts),
            self.network.welcomed,
            self.network.trace,
        )
        for process in self.everyone:
            process.kill()
        if self._directory is not None:
            self._directory.cleanup()
        return outcome

    @property
    def alive(self) -> list[Task]:
        return [process.tasks[0] for process in self.everyone if process.tasks[0].is_alive()]

    @property
    def working(self) -> bool:
        return any(task.is_alive() for task in self._working)

    def kill(self, name: str) -> None:
        """Kill the latest process of a member, if it lives."""
        process = self.processes[name]
        if process.dead or not process.tasks[0].is_alive():
            return
        process.kill()
        self.launcher.exited(process, Exit(signum=signal.SIGKILL))

    # ---- processes

    def _start(self, name: str) -> None:
        role, _, rank = name.partition(" ")
        if role == "scheduler":
            self._spawn(name, self._schedule)
        elif role == "worker":
            process = self._spawn(name, partial(self._work, int(rank)))
            self._working[int(rank) :] = [process.tasks[0], *self._working[int(rank) + 1 :]]
        else:
            self._spawn(name, partial(self._serve, role, int(rank)))

    def _spawn(self, name: str, target: Callable[[Process], Any]) -> Process:
        self.starts[name] += 1
        process = self.processes[name] = Process(name, self.starts[name])
        self.everyone.append(process)
        self._task(process, partial(self._run, process, target), name).start()
        return process

    def _run(self, process: Process, target: Callable[[Process], Any]) -> Any:
        how = Exit(1)
        try:
            result = target(process)
            how = Exit(0 if process.name.startswith("worker") else result)
            return result
        except Exception as exc:
            self.launcher.reported(process, reported(exc))
            raise
        finally:
            if process.name.startswith("worker"):
                self._worked_at = self.world.now
            if not process.dead:
                self.launcher.exited(process, how)

    def _hand_over(self, report: ExitReport, env: Mapping[str, str]) -> bool:
        """Take a report of the process that runs now: they all have one environment here."""
        task = self.world.current
        self.launcher.reported(next(process for process in self.everyone if task in process.tasks), report)
        return True

    def _task(self, process: Process, target: Callable[[], Any], name: str, daemon: bool = True) -> Task:
        task = Task(self.world, target, name)
        process.tasks.append(task)
        return task

    def _thread(self, process: Process) -> Callable[..., Any]:
        return partial(self._task, process)

    def _end(self, process: Process) -> SimulatedTransport:
        return SimulatedTransport(self.network, process)

    def _config(self, role: str, rank: int = -1, start: int = 1) -> Config:
        return Config(role=role, rank_hint=rank, start=start, **self._options)

    def _schedule(self, process: Process) -> int:
        config = self._config("scheduler", start=process.start)
        if self._directory is not None:
            config = replace(config, scheduler_log=f"{self._directory.name}/log")
        return run_scheduler(config, self._end(process), self.world.clock)

    def _serve(self, role: str, rank: int, process: Process) -> int:
        return run_member(
            self._config(role, rank, process.start),
            partial(self._end, process),
            f"inproc://{role}-{rank}-{process.start}",
            self.world.clock,
            self._thread(process),
        )

    def _work(self, rank: int, process: Process) -> Any:
        session = Session(
            replace(self._config("worker", rank, process.start), aggregator=self._aggregators.get(rank, -1)),
            partial(self._end, process),
            clock=self.world.clock,
            thread=self._thread(process),
        )
        session.client.mutual.only_these_act = lambda _: True  # its threads are tasks, of which Python does not know
        session.join()
        try:
            store = DistStore(session, f"dist_{self._rule.mode}", self._rule)
            result = self._program(store)
            store.close()
        except Exception as exc:  # what the end of a script tells the others
            session.leave(f"{type(exc).__name__}: {exc}")
            raise
        session.leave()
        return result
