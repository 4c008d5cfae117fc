"""The command lines of ssh and rsync. No I/O."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from launcher.hosts.hostfile import Host
from launcher.job.cluster import Cluster

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
    """The words of ssh before the host name and the command. The user's options come first, and so take precedence."""
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
    """The words that copy the content of a directory into a directory on a host."""
    argv = ["rsync", "-az", "-s"]
    if cluster.sync_gitignore:
        argv += ["--exclude=/.git", "--filter=:- .gitignore"]
    argv += [f"--exclude={pattern}" for pattern in cluster.sync_exclude]
    if host.here:
        return [*argv, "--", f"{source.rstrip('/')}/", f"{target}/"]
    name = f"[{host.name}]" if ":" in host.name else host.name
    return [*argv, "-e", shlex.join(ssh(cluster, host)), "--", f"{source.rstrip('/')}/", f"{name}:{target}/"]
