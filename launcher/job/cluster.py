"""The options that only some launchers take: hosts, network, failures, resources. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, fields

PLACEMENTS = ("fill", "round-robin")


@dataclass(frozen=True)
class Cluster:
    """Options of launch.py that depend on the launcher. Each launcher takes some; the others must keep their defaults.

    Args:
        hostfile: a file with the hosts of the workers.
        server_hosts: a file with the hosts of the servers; None for the hosts that have workers.
        placement: `fill` uses all slots of a host before the next host; `round-robin` takes the hosts in turn.
        sync_dst_dir: the directory on each host to copy the working directory to; the job runs there. A local job
            ignores it.
        sync_exclude: patterns of files that are not copied, in the syntax of rsync's --exclude.
        sync_gitignore: whether to leave out .git and the files that .gitignore files name.
        ssh_config: a configuration file for ssh.
        ssh_option: options for ssh, in the syntax of its -o.
        python: the path of the interpreter on the hosts; if empty, that of launch.py's interpreter.
        host_ip: the address by which the hosts reach this machine.
        interface: the network interface whose address every host uses.
        encryption: whether links between hosts are encrypted and only members can open them.
        host_aggregation: whether hosts with several workers have aggregators.
        replicas: how many standbys each server has, 0 or 1.
        restarts: how many times processes that die are started again, in all; None for the default.
        readers: the file to write for readers, who read the values of the job while it runs; None for no readers.
        max_readers: how many readers there may be at once.
        dashboard: the port of the page that shows the job, 0 for any; None for no page.
        dashboard_token_file: the file with the page's token; None for a new token.
        trace: the file of the job's trace and the rounds that it has, after a colon; None for no trace.
        attach: the rank of the worker that has the terminal; None for none by option.
        inject: faults to inject, as `launcher.job.injection` reads them.
        job_name: the name of the job in the cluster's tools.
        queue: the queue or partition.
        time: the time limit, in the cluster's notation.
        worker_cores, server_cores: the number of cores for each process of that role; 0 for the default.
        worker_memory, server_memory: the memory for each process of that role, such as 500m or 4g.
        gpus_per_worker: the number of GPUs for each worker; 0 for no request.
        cluster_option: words that are passed to the cluster's command unchanged.
        image: the container image.
        namespace: the Kubernetes namespace.
        yarn_jar: the path of YARN's distributed shell.
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
    host_aggregation: bool = True
    replicas: int = 0
    restarts: int | None = None
    readers: str | None = None
    max_readers: int = 64
    dashboard: int | None = None
    dashboard_token_file: str | None = None
    trace: str | None = None
    attach: int | None = None
    inject: tuple[str, ...] = ()
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
        """The names of the fields that differ from their defaults."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]


def option(field: str) -> str:
    """The command-line option of a field."""
    switched_off = getattr(Cluster, field) is True
    return f"--{'no-' if switched_off else ''}{field.replace('_', '-')}"
