"""Every option of a cluster, with a value that is not its default."""

from __future__ import annotations

from typing import Any

from launcher.job.description import option

# A value for each, that is not its default.
VALUES: dict[str, Any] = {
    "hostfile": "hosts",
    "server_hosts": "others",
    "placement": "round-robin",
    "sync_dst_dir": "/d",
    "sync_exclude": ("*.pt",),
    "sync_gitignore": True,
    "ssh_config": "cfg",
    "ssh_option": ("A=b", "C=d"),
    "python": "/py",
    "host_ip": "10.0.0.1",
    "interface": "eth0",
    "encryption": False,
    "host_aggregation": False,
    "replicas": 1,
    "min_workers": 1,
    "max_workers": 3,
    "restarts": 7,
    "readers": "/r",
    "max_readers": 8,
    "dashboard": 8080,
    "dashboard_token_file": "/t",
    "trace": "/t.json:5-20",
    "attach": 0,
    "inject": ("kill:server:0@round:9", "stop:scheduler@0.5s"),
    "job_name": "mnist",
    "queue": "gpu",
    "time": "2:00:00",
    "worker_cores": 4,
    "server_cores": 2,
    "worker_memory": "4g",
    "server_memory": "500m",
    "gpus_per_worker": 2,
    "cluster_option": ("--exclusive",),
    "image": "me/mine",
    "namespace": "team",
    "yarn_jar": "ds.jar",
}


def spelt(field: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [option(field)]
    return [f"{option(field)}={one}" for one in (value if isinstance(value, tuple) else (value,))]
