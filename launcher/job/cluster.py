"""Where a job runs and how it gets there: what some kinds of cluster want to know and others do not."""

from __future__ import annotations

from dataclasses import dataclass, fields

PLACEMENTS = ("fill", "round-robin")


@dataclass(frozen=True)
class Cluster:
    """Options of launch.py; each kind of cluster takes some of them, and the others must be left as they are.

    Args:
        hostfile: a file with the hosts to run on.
        server_hosts: a file with the hosts of the servers, if those are not to be beside workers.
        placement: fill a host's slots before the next host's, or take the hosts in turn.
        sync_dst_dir: where to copy the working directory on each host; the job runs there. A local job ignores it.
        sync_exclude: patterns of files that are not copied, as rsync's --exclude knows them.
        sync_gitignore: whether to leave out what .gitignore files name, and .git.
        ssh_config: a configuration file for ssh.
        ssh_option: options for ssh, as its -o takes them.
        python: the interpreter on the hosts; the path of launch.py's own if empty.
        host_ip: the address of this machine, by which the hosts reach it.
        interface: the network interface whose address to use, on every host.
        encryption: whether links between hosts are encrypted, and only members can make them.
        job_name: how the cluster's tools show the job.
        queue: the queue or partition.
        time: how long the job may take, as the cluster writes it.
        worker_cores, server_cores: processors for each process of that role.
        worker_memory, server_memory: memory for each, as 500m or 4g.
        gpus_per_worker: GPUs for each worker.
        cluster_option: words for the cluster's own command, as they are.
        image: the container image.
        namespace: the Kubernetes namespace.
        yarn_jar: YARN's distributed shell.
    """

    hostfile: str | None = None
    server_hosts: str | None = None
    placement: str = "fill"
    sync_dst_dir: str | None = None
    sync_exclude: tuple[str, ...] = ()
    sync_gitignore: bool = False
    ssh_config: str | None = None
    ssh_option: tuple[str, ...] = ()
    python: str = ""
    host_ip: str = ""
    interface: str = ""
    encryption: bool = True
    job_name: str = "kvstore"
    queue: str = ""
    time: str = ""
    worker_cores: int = 0
    server_cores: int = 0
    worker_memory: str = ""
    server_memory: str = ""
    gpus_per_worker: int = 0
    cluster_option: tuple[str, ...] = ()
    image: str = ""
    namespace: str = ""
    yarn_jar: str = ""

    def given(self) -> list[str]:
        """The fields that are not at their defaults."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]


def option(field: str) -> str:
    """What a field is called on the command line."""
    return "--no-encryption" if field == "encryption" else f"--{field.replace('_', '-')}"
