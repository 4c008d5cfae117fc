"""The ssh launcher: one connection to each host, with an agent at its end; files are copied by rsync."""

from __future__ import annotations

import os
import selectors
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvstore.job.contract import Member, aggregated
from launcher.agents import remote_run as agents
from launcher.agents.fleet import Carrier, RemoteAgent
from launcher.agents.links.protocol import Hello
from launcher.agents.roll_call import RollCall, report
from launcher.errors import LaunchError
from launcher.hosts.hostfile import Host, place, read
from launcher.job import dryrun
from launcher.job.description import Cluster, Job
from launcher.job.tasks import Rendezvous
from launcher.kinds.kind import (
    WITH_AGENTS,
    Kind,
    agent_words,
)
from launcher.processes.machine import require_files
from launcher.supervision.supervisor import OnFailure

_SYNC_NOTICE_S = 30.0
_FILES = 4  # open for each host: the pipes of ssh, and one that reports its exit
# What ssh, the shell or Python print, and what to do about it. The first match counts.
_HINTS = (
    (
        "No module named",
        "the package is not installed for that interpreter; install it there, or name another: --python",
    ),
    (
        "IDENTIFICATION HAS CHANGED",
        "its key is not the one that ssh knows; if it was newly installed, remove the old key: ssh-keygen -R HOST",
    ),
    ("Host key verification failed", "connect once by hand, or pass --ssh-option StrictHostKeyChecking=accept-new"),
    ("Permission denied (", "ssh must log in without a question: keys, an agent, or --ssh-config"),
    ("Could not resolve hostname", "check its name in the hostfile"),
    ("Connection refused", "no sshd listens there; another port is host:port in the hostfile"),
    ("timed out", "it is down, or a firewall is between"),
    ("No route to host", "it is down, or not in a network that this machine reaches"),
    ("not found", "no such interpreter there; name one with --python"),
    ("No such file or directory", "no such interpreter there; name one with --python"),
    ("Permission denied", "that interpreter cannot be executed; name another with --python"),
    ("exited with code 255", "its agent there was killed, or the connection broke"),
)

# The meaning of rsync's exit codes. It may print nothing, because messages from the other end may be lost.
_RSYNC = {
    11: "a file could not be read or written; is there space left on the device?",
    12: "the connection ended; is rsync installed there?",
}


CONNECT_S = 8
# ssh must not ask, because nobody answers. It notices within 9 s that a host is cut off. Settings of the user's
# configuration that are for terminals would keep the agent's streams from us, or the connection open after the job.
_OPTIONS = (
    "BatchMode=yes",
    f"ConnectTimeout={CONNECT_S}",
    "ConnectionAttempts=1",
    "ServerAliveInterval=3",
    "ServerAliveCountMax=3",
    "ControlMaster=no",
    "ClearAllForwardings=yes",
    "RemoteCommand=none",
)


def ssh(cluster: Cluster, host: Host) -> list[str]:
    argv = ["ssh", "-T", "-x"]
    if cluster.ssh_config is not None:
        argv += ["-F", cluster.ssh_config]
    for option in (*cluster.ssh_option, *_OPTIONS):
        argv += ["-o", option]
    if host.port:
        argv += ["-p", str(host.port)]
    if host.user:
        argv += ["-l", host.user]
    return argv


def remote_command(cluster: Cluster, host: Host, argv: Sequence[str]) -> list[str]:
    """The words that run a command on a host, in the user's login shell."""
    return [*ssh(cluster, host), "--", host.name, f"exec {shlex.join(argv)}"]


def rsync(cluster: Cluster, host: Host, source: str, target: str) -> list[str]:
    argv = ["rsync", "-az", "-s"]
    if cluster.sync_gitignore:
        argv += ["--exclude=/.git", "--filter=:- .gitignore"]
    argv += [f"--exclude={pattern}" for pattern in cluster.sync_exclude]
    if host.here:
        return [*argv, "--", f"{source.rstrip('/')}/", f"{target}/"]
    name = f"[{host.name}]" if ":" in host.name else host.name
    return [*argv, "-e", shlex.join(ssh(cluster, host)), "--", f"{source.rstrip('/')}/", f"{name}:{target}/"]


def run(job: Job, on_failure: OnFailure) -> int:
    job.check_max_workers()
    hosts = placed(job)
    connections = len(hosts) * (1 if job.cluster.sync_dst_dir is None else 2)
    require_files(_FILES * connections + job.output.open_files(job.num_placed + 1))
    if job.cluster.ssh_config is not None and not os.access(job.cluster.ssh_config, os.R_OK):
        raise LaunchError(f"cannot read --ssh-config {job.cluster.ssh_config}")
    return agents.run(job, on_failure, SshRecruiter(job, hosts), "ssh")


def dry_run(job: Job) -> str:
    hosts = placed(job)
    groups = aggregated([(host.name, members) for host, members in hosts.items()]) if job.aggregates else []
    before: dict[Member, Member] = {("worker", ranks[0]): ("aggregator", n) for n, ranks in enumerate(groups)}
    at = Rendezvous("(this machine)", 0, "(the job)", "ssh", "(the host)", aggregated=groups)
    lines = ["# scheduler: on this machine"]
    for host, placed_here in hosts.items():
        members = [member for given in placed_here for member in (before.get(given), given) if member is not None]
        lines.append(f"# {host.name}: {', '.join(f'{role} {rank}' for role, rank in members)}")
        if job.cluster.sync_dst_dir is not None:
            lines.append(shlex.join(rsync(job.cluster, host, str(Path.cwd()), job.cluster.sync_dst_dir)))
        lines.append(shlex.join(argv(job, host)))
        lines += [dryrun.elsewhere(job, at, role, rank, job.python) for role, rank in members]
    return "\n".join(lines)


def placed(job: Job) -> dict[Host, list[Member]]:
    cluster = job.cluster
    if cluster.hostfile is None:
        raise LaunchError("--launcher ssh needs a hostfile: -H FILE, with one host on each line")
    servers = None if cluster.server_hosts is None else read(cluster.server_hosts)
    return place(job, read(cluster.hostfile), servers)


def argv(job: Job, host: Host) -> list[str]:
    agent = agent_words(job)
    return agent if host.here else remote_command(job.cluster, host, agent)


class SshRecruiter(agents.Recruiter):
    """Starts an agent on each host by ssh. On this machine it needs no ssh."""

    def __init__(self, job: Job, hosts: dict[Host, list[Member]]) -> None:
        self._job = job
        self._hosts = hosts
        self._carriers: list[Carrier] = []
        self._remotes: dict[Host, RemoteAgent] = {}

    def recruit(self, roll_call: RollCall, selector: selectors.BaseSelector) -> Sequence[RemoteAgent]:
        for host in self._hosts:
            name = "the agent" if host.here else f"ssh to {host.name}"
            self._carriers.append(Carrier(name, argv(self._job, host), dict(os.environ), linked=True))
        for (host, members), carrier in zip(self._hosts.items(), self._carriers, strict=True):
            carrier.open(selector)
            assert carrier.link is not None  # noqa: S101 (for the type checker)
            remote = RemoteAgent(host.name, carrier.link, carrier, hint=_hint)
            remote.members = members
            remote.open(selector)
            self._remotes[host] = remote
        return list(self._remotes.values())

    def prepare(self, roll_call: RollCall, selector: selectors.BaseSelector) -> None:
        """Copy the working directory to all hosts at once, if that is wanted."""
        cluster = self._job.cluster
        if cluster.sync_dst_dir is None:
            return
        source, copies = str(Path.cwd()), {}
        for host in self._hosts:
            if host.here and Path(cluster.sync_dst_dir).resolve() == Path.cwd():
                continue
            words = rsync(cluster, host, source, cluster.sync_dst_dir)
            copies[host] = Carrier(f"rsync to {host.name}", words, dict(os.environ), linked=False)
        self._carriers += copies.values()
        for carrier in copies.values():
            carrier.open(selector)
        began = time.monotonic()
        while not roll_call.wait(
            lambda: all(carrier.poll() is not None for carrier in copies.values()),
            _SYNC_NOTICE_S,
            lambda: list(self._remotes.values()),
        ):
            waiting = ", ".join(host.name for host, carrier in copies.items() if carrier.poll() is None)
            print(f"launch.py: copying to {waiting} for {time.monotonic() - began:.0f} s", file=sys.stderr)
        lines = []
        for host, carrier in copies.items():
            how = carrier.wait(0)
            if how is not None and how.status:
                said = carrier.explanation or _RSYNC.get(how.status, "it does not say why")
                lines.append(f"{host.name}: rsync {how}: {said}")
        if lines:
            raise report(lines, len(self._hosts))

    def toward(self) -> str:
        """The address of a host that is not this machine, and answers."""
        for host, remote in self._remotes.items():
            hello = remote.said(Hello)
            if not host.here and hello is not None:
                return hello.reached_at or host.name
        return ""

    def close(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        for carrier in self._carriers:
            carrier.close(max(0.0, deadline - time.monotonic()))


def _hint(text: str) -> str:
    for sign, hint in _HINTS:
        if sign in text:
            return hint
    return ""


KIND = Kind(
    run=run,
    dry_run=dry_run,
    takes=WITH_AGENTS
    | {
        "hostfile",
        "max_workers",
        "server_hosts",
        "placement",
        "sync_dst_dir",
        "sync_exclude",
        "sync_gitignore",
        "ssh_config",
        "ssh_option",
    },
)
