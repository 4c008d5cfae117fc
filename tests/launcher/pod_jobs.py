"""Jobs for Kubernetes, and their objects."""

from __future__ import annotations

import os
from typing import Any

from kvstore.job.curve_keys import Keyring
from launcher.job.description import Cluster, Job
from launcher.job.tasks import members
from launcher.kinds.pods.manifests import manifests

HOSTILE = 'a\'b "c" $(id) $(DMLC_ROLE) $$(DMLC_ROLE) `x` $HOME ${HOME} %s \\n\n:=ünï \U0001f600 - [x]: {y} #z\n'


RAW = os.fsdecode(b"\xff\xfe")


def job(**options: Any) -> Job:
    cluster = Cluster(image="registry.example/train:1", **options.pop("cluster", {}))
    return Job(**{"num_workers": 2, "num_servers": 1, "command": ("python train.py",), "cluster": cluster, **options})


FULL = {
    "namespace": "ml",
    "job_name": "mnist",
    "worker_cores": 4,
    "server_cores": 2,
    "worker_memory": "500m",
    "server_memory": "4g",
    "gpus_per_worker": 1,
    "time": "2:00:00",
}


def made(one: Job, environ: dict[str, str] | None = None) -> list[dict[str, Any]]:
    keyring = Keyring.random(members(one)) if one.cluster.encryption else None
    return manifests(one, "mnist-0a1b2c", keyring, environ or {})
