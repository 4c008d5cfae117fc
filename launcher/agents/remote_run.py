"""Runs a job through agents on other hosts. The scheduler runs on this machine.

No process starts before every host has answered, has an address that the others reach, and reaches this machine.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvstore.job.address import Address
from kvstore.job.config import Config
from kvstore.job.contract import Role, aggregated
from kvstore.job.curve_keys import Keyring
from kvstore.job.processes import source_root
from kvstore.job.settings import ENCRYPTION
from kvstore.job.system import cores
from launcher.agents.fleet import Fleet, RemoteAgent
from launcher.agents.links import protocol as p
from launcher.agents.roll_call import (
    Interrupted,
    RollCall,
    addresses_chosen,
    has_servers,
    surveyed,
    unfit,
    unreached,
    version_problem,
)
from launcher.errors import LaunchError, as_launch_error
from launcher.hosts import reach
from launcher.job.description import Job
from launcher.job.tasks import (
    AGENT,
    LOCAL_RANK,
    LOCAL_SIZE,
    HostEnvironment,
    Rendezvous,
    Task,
    environment,
    key_holders,
    member_variables,
    members,
    passed,
    words,
)
from launcher.output.display import of_terminal
from launcher.output.outlet import Outlet
from launcher.processes.children import Children
from launcher.processes.job_run import Caller, JobRun
from launcher.processes.machine import open_standard_streams
from launcher.supervision.crew import SignalQueue, called
from launcher.supervision.ending import EndingLimits
from launcher.supervision.supervisor import OnFailure

HELLO_S = 30.0  # ssh gives up much earlier; the rest is for Python to start from a slow disk
SURVEY_S = 30.0
PROBE_S = 20.0
LOOPBACK = "127.0.0.1"
# An agent may be silent for this many times the limit of a member. After an outage, TCP may take twice its duration to
# send again what was lost; and the loss of a host's members must be noticed before the loss of its agent.
_SILENCE = 2.5


class HostTasks:
    """The tasks of one job. The scheduler's is the first, and runs on this machine.

    Args:
        remotes: the agents. All have been surveyed, and know their members. They are given the numbers of their tasks.
        at: where the processes of the job find each other.

    Attributes:
        tasks: all of them. Those of agents have the variables that are particular to them, and no words: the agents add
            the rest.
    """

    def __init__(self, job: Job, remotes: Sequence[RemoteAgent], at: Rendezvous, environ: Mapping[str, str]) -> None:
        self._job = job
        self._remotes = remotes
        self._at = at
        self._environ = environ
        where = {member: remote for remote in remotes for member in remote.members}
        self.tasks: list[Task] = []
        for index, (role, rank) in enumerate(members(job, len(at.aggregated))):
            if role == "scheduler":
                self.tasks.append(self._here(role, rank))
                continue
            remote = where[role, rank]
            remote.indices.append(index)
            self.tasks.append(self._there(remote, role, rank))

    @property
    def where(self) -> str:
        hosts = sorted({task.host for task in self.tasks if task.host})
        return f"on {hosts[0]}" if len(hosts) == 1 else f"on {len(hosts)} hosts"

    def start(self, remote: RemoteAgent, directory: str, limit_s: float) -> p.StartTasks:
        """Return what to tell an agent.

        `directory`: which the tasks run in. `limit_s`: how long the agent may hear nothing before it ends them.
        """
        return p.StartTasks(
            self._at.mark,
            os.fsencode(directory),
            [os.fsencode(word) for word in self._job.command],
            [os.fsencode(word) for word in self._job.server_argv],
            limit_s,
            self._job.cluster.gpus_per_worker,
            [self._told(index) for index in remote.indices],
        )

    def move(
        self, index: int, before: RemoteAgent, remote: RemoteAgent, variables: Mapping[str, str], start: p.StartTasks
    ) -> p.StartTasks:
        """Give a task to another agent; return what to tell that one, which has been told `start`."""
        member = self.tasks[index].role, self.tasks[index].rank
        before.members.remove(member)
        before.indices.remove(index)
        remote.members.append(member)
        remote.indices.append(index)
        task = self._there(remote, *member)
        self.tasks[index] = replace(task, env={**task.env, **variables})
        return replace(start, tasks=[self._told(index)])

    def add(self, index: int, rank: int, remote: RemoteAgent, start: p.StartTasks) -> tuple[Task, p.StartTasks]:
        """Give an agent one more worker; return its task, and what to tell the agent, which has been told `start`."""
        remote.members.append(("worker", rank))
        remote.indices.append(index)
        task = self._there(remote, "worker", rank)
        told = [index, task.role, task.rank, int(task.env[LOCAL_SIZE]), p.pack(task.env)]
        return task, replace(start, tasks=[told])

    def _told(self, index: int) -> list[object]:
        task = self.tasks[index]
        return [index, task.role, task.rank, int(task.env[LOCAL_SIZE]), p.pack(task.env)]

    def _here(self, role: Role, rank: int) -> Task:
        around = HostEnvironment(self._environ, sys.executable, cores(), source_root=source_root())
        own = {**self._settings(self._at, role, rank), AGENT: self._at.mark}
        return Task(
            role,
            rank,
            words(self._job, role, sys.executable, rank),
            environment(around, role, 1, own),
        )

    def _there(self, remote: RemoteAgent, role: Role, rank: int) -> Task:
        at_host = replace(self._at, node_host=surveyed(remote).address, fd=None)
        own = self._settings(at_host, role, rank) | self._locally(remote, role, rank)
        return Task(role, rank, (), own, remote.host)

    def _settings(self, at: Rendezvous, role: Role, rank: int) -> dict[str, str]:
        plain = {} if at.keyring is not None else {ENCRYPTION.name: "0"}
        shown = of_terminal(Outlet(), self._environ, self._job.output) if role == "worker" else {}
        return {**shown, **passed(self._job, self._environ), **member_variables(self._job, at, role, rank), **plain}

    def _locally(self, remote: RemoteAgent, role: Role, rank: int) -> dict[str, str]:
        """The variables with its number among the members of its role on its host."""
        ranks = sorted(
            at for other in self._remotes if other.host == remote.host for r, at in other.members if r == role
        )
        return {LOCAL_RANK: str(ranks.index(rank)), LOCAL_SIZE: str(len(ranks))}


class Recruiter:
    """Starts agents on their hosts."""

    def recruit(self, roll_call: RollCall, selector: selectors.BaseSelector) -> Sequence[RemoteAgent]:
        """Start the agents and return them, each with the members that will run there.

        Agents that have not said hello need not be there yet. The caller waits for them, and reports those that fail.
        """
        raise NotImplementedError

    def prepare(self, roll_call: RollCall, selector: selectors.BaseSelector) -> None:
        """Prepare the hosts, unless they share their files. The directory that the job runs in exists."""

    def toward(self) -> str:
        """A host that must reach this machine; empty if all processes run on this machine."""
        raise NotImplementedError

    def close(self, patience: float) -> None:
        """End what it has started here, in so many seconds at most. May be called again."""
        raise NotImplementedError


def run(
    job: Job,
    on_failure: OnFailure,
    recruiter: Recruiter,
    kind: str,
    *,
    environ: Mapping[str, str] | None = None,
    limits: EndingLimits | None = None,
) -> int:
    """Run a job through agents, and wait for its end. Main thread only, because of the signals.

    `kind`: the name of the launcher. `environ`: the caller's environment; that of this process if None. `limits`: how
    long the phases of an ending may last. Returns the exit code, as a `Kind` does.
    """
    environ = dict(os.environ) if environ is None else environ
    open_standard_streams()
    with SignalQueue() as signals, selectors.DefaultSelector() as selector:
        try:
            roll_call = RollCall(selector, signals)
            remotes = recruiter.recruit(roll_call, selector)
            agent_job = _AgentJob(job, remotes, recruiter, kind, environ)
            try:
                agent_job.survey(roll_call, selector)
                roll_call.leave()
                return agent_job.run(selector, signals, on_failure, limits)
            finally:
                agent_job.close()
                for remote in remotes:
                    remote.close()
        except Interrupted as interrupted:
            print(f"launch.py: {called(interrupted.signum)}: nothing was started", file=sys.stderr)
            return 128 + interrupted.signum
        finally:
            recruiter.close(1.0)


class _AgentJob:
    def __init__(
        self, job: Job, remotes: Sequence[RemoteAgent], recruiter: Recruiter, kind: str, environ: Mapping[str, str]
    ) -> None:
        self._job, self._remotes, self._recruiter = job, remotes, recruiter
        self._kind, self._environ = kind, environ
        placed = [(remote.host, remote.members) for remote in remotes]
        self._aggregated = aggregated(placed) if job.aggregates else []
        for aggregator, ranks in enumerate(self._aggregated):
            first = next(remote for remote in remotes if ("worker", ranks[0]) in remote.members)
            first.members.append(("aggregator", aggregator))
        self._listener: socket.socket | None = None
        self._keyring: Keyring | None = None

    def close(self) -> None:
        """Close the scheduler's socket. May be called again."""
        if self._listener is not None:
            self._listener.close()

    def survey(self, roll_call: RollCall, selector: selectors.BaseSelector) -> None:
        cluster = self._job.cluster
        if cluster.encryption:
            # Which takes a moment, while the agents start.
            self._keyring = Keyring.random(
                key_holders(self._job, len(self._aggregated)), readers=cluster.readers is not None
            )
        fit = roll_call.expect(self._remotes, p.Hello, HELLO_S, version_problem)
        if not fit:
            roll_call.conclude(len(self._remotes))
        own = self._address(self._recruiter.toward())
        self._listener = _listen(own)
        synced = cluster.sync_dst_dir is not None
        self._directory = cluster.sync_dst_dir if synced and cluster.sync_dst_dir else str(Path.cwd())
        question = p.Survey(
            cluster.interface,
            own.ip,
            os.fsencode(self._directory),
            synced,
            [] if synced or self._sets_path() else [os.fsencode(word) for word in self._job.command],
        )
        fit = roll_call.ask(dict.fromkeys(fit, question), p.Surveyed, SURVEY_S, unfit)
        for line in addresses_chosen(own, fit):
            print(f"launch.py: {line}", file=sys.stderr)
        targets: list[list[object]] = [["this machine", own.ip, self._listener.getsockname()[1]]]
        targets += [[r.host, surveyed(r).address, surveyed(r).port] for r in fit if has_servers(r)]
        roll_call.ask(dict.fromkeys(fit, p.Probe(targets)), p.Probed, PROBE_S, unreached)
        roll_call.conclude(len(self._remotes))
        self._recruiter.prepare(roll_call, selector)

    def _sets_path(self) -> bool:
        """Whether workers look for their command on a PATH that agents do not have."""
        return "PATH" in self._job.env_worker or "PATH" in self._job.env_names

    def run(
        self,
        selector: selectors.BaseSelector,
        signals: SignalQueue,
        on_failure: OnFailure,
        limits: EndingLimits | None,
    ) -> int:
        assert self._listener is not None  # noqa: S101 (for the type checker)
        caller = Caller(signals=signals)
        job, environ = self._job, self._environ
        with JobRun(job, on_failure, environ, limits, caller, variable=AGENT, selector=selector) as running:
            at = running.meet(
                self._listener,
                cluster=self._kind,
                node_host=self._listener.getsockname()[0],
                keyring=self._keyring,
                aggregated=self._aggregated,
            )
            placed = HostTasks(job, self._remotes, at, environ)
            scheduler = Children({0: placed.tasks[0]}, running.guard, pass_fds=running.scheduler_fds)
            with as_launch_error():
                limit_s = _SILENCE * Config.from_env(environ).heartbeat_timeout_s
            starts = {remote: placed.start(remote, self._directory, limit_s) for remote in self._remotes}
            fleet = Fleet(
                *(self._remotes, starts, limit_s),
                lambda index, before, remote, more: placed.move(index, before, remote, more, starts[remote]),
                (lambda index, rank, remote: placed.add(index, rank, remote, starts[remote]))
                if job.cluster.max_workers
                else None,
            )
            return running.start(placed.tasks, [scheduler, fleet], placed.where).run()

    def _address(self, toward: str) -> Address:
        cluster = self._job.cluster
        if not toward and not cluster.host_ip and not cluster.interface:
            return Address(LOOPBACK, "all hosts are this machine")
        return reach.address(host=cluster.host_ip, interface=cluster.interface, toward=toward)


def _listen(own: Address) -> socket.socket:
    try:
        return reach.listener(own.ip)
    except OSError as error:
        raise LaunchError(f"cannot listen at {own.ip}: {error.strerror}", exit_code=1) from None
