"""The tasks of a job whose members run on the hosts of agents: their environments, and what each agent is to start."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvstore.job.contract import Role
from kvstore.job.processes import source_root
from kvstore.job.settings import ENCRYPTION
from kvstore.job.system import cores
from launcher.agents.answers import surveyed
from launcher.agents.links import protocol as p
from launcher.agents.remote import RemoteAgent
from launcher.job.description import Job
from launcher.job.tasks import (
    AGENT,
    LOCAL_RANK,
    LOCAL_SIZE,
    HostEnvironment,
    Rendezvous,
    Task,
    environment,
    member_variables,
    members,
    passed,
    words,
)
from launcher.output.display import of_terminal
from launcher.output.outlet import Outlet


class HostTasks:
    """The tasks of one job. The scheduler's is the first, and runs on this machine.

    Args:
        job: what to run.
        remotes: the agents. All have been surveyed, and know their members. They are given the numbers of their tasks.
        at: where the processes of the job find each other.
        environ: the caller's environment.

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
        """On which host or how many they are, for messages."""
        hosts = sorted({task.host for task in self.tasks if task.host})
        return f"on {hosts[0]}" if len(hosts) == 1 else f"on {len(hosts)} hosts"

    def start(self, remote: RemoteAgent, directory: str, limit_s: float) -> p.StartTasks:
        """Return what to tell an agent.

        Args:
            remote: the agent.
            directory: which the tasks run in.
            limit_s: how long the agent may hear nothing before it ends them.
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

    def _told(self, index: int) -> list[object]:
        task = self.tasks[index]
        return [index, task.role, task.rank, int(task.env[LOCAL_SIZE]), p.pack(task.env)]

    def _here(self, role: Role, rank: int) -> Task:
        around = HostEnvironment(self._environ, sys.executable, cores(), source_root=source_root())
        own = {**self._settings(self._at, role, rank), AGENT: self._at.mark}
        return Task(role, rank, words(self._job, role, sys.executable, rank), environment(around, role, 1, own))

    def _there(self, remote: RemoteAgent, role: Role, rank: int) -> Task:
        at_host = replace(self._at, node_host=surveyed(remote).address, fd=None)
        own = self._settings(at_host, role, rank) | self._locally(remote, role, rank)
        return Task(role, rank, (), own, remote.host)

    def _settings(self, at: Rendezvous, role: Role, rank: int) -> dict[str, str]:
        plain = {} if at.keyring is not None else {ENCRYPTION.name: "0"}
        shown = (
            of_terminal(Outlet(), self._environ, self._job.output, self._remotes[0].host) if role == "worker" else {}
        )
        return {**shown, **passed(self._job, self._environ), **member_variables(self._job, at, role, rank), **plain}

    def _locally(self, remote: RemoteAgent, role: Role, rank: int) -> dict[str, str]:
        """The variables with its number among the members of its role on its host."""
        ranks = sorted(
            at for other in self._remotes if other.host == remote.host for r, at in other.members if r == role
        )
        return {LOCAL_RANK: str(ranks.index(rank)), LOCAL_SIZE: str(len(ranks))}
