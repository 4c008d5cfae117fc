"""A job as Kubernetes objects, which are plain mappings. No I/O.

    Secret   <name>-keys                the secret key of each process, one file each; a container sees its own alone
    Secret   <name>-<role>              the variables of a role: values of the user's may be secrets
    Service  <name>                     so that the scheduler's pod has a name, <name>-scheduler-0.<name>
    Job      <name>-<role>              Indexed: pod number i is the process of rank i

A pod begins as `launcher.kinds.pods.entry`, which puts a process's environment together from what is mounted.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from typing import Any, cast

from kvstore.job import settings
from kvstore.job.contract import Role
from kvstore.job.curve_keys import Keyring
from launcher.errors import LaunchError
from launcher.job.command import program_argv
from launcher.job.description import RESERVED, Cluster, Job
from launcher.job.dryrun import HIDDEN
from launcher.job.tasks import Rendezvous, passed, words
from launcher.kinds.kind import mebibytes, seconds
from launcher.kinds.pods.entry import INDEX, KEY, MOUNT, VARIABLES

Manifest = dict[str, Any]

JOB, ROLE = "kvstore-job", "kvstore-role"  # labels
PORT = 9091  # each pod has an address of its own, so that no other job's is in the way
ROLES: tuple[Role, ...] = ("scheduler", "server", "worker")
PYTHON = "python3"
_TTL_S = 3600  # what is left of a job whose launch.py was killed
_GRACE_S = 10
_SECRET_BYTES = 1 << 20  # the most that one Secret holds
_COMMON = (settings.ROOT_KEY.name, settings.MEMBER_KEYS.name)


def manifests(job: Job, name: str, keyring: Keyring | None, environ: Mapping[str, str]) -> list[Manifest]:
    """Every object of a job, in the order in which to create them.

    `name`: the name of the job, with which the names of all objects begin. `keyring`: the members' keys, if links are
    encrypted. `environ`: the caller's environment, in which the job's `env_names` are.
    """
    if not job.cluster.image:
        raise LaunchError("--launcher kubernetes needs --image, a container image with this package and your program")
    words(job, "worker", PYTHON)  # so that an error shows now, and not in N containers
    objects = []
    if keyring is not None:
        secrets = {f"{role}-{rank}": pair[1] for (role, rank), pair in keyring.pairs.items()}
        objects.append(_secret(job, f"{name}-keys", name, secrets))
    for role in ROLES:
        if variables := _variables(job, role, keyring, environ):
            objects.append(_secret(job, f"{name}-{role}", name, variables))
    return [*objects, _service(job, name), *(_job(job, name, role, keyring, environ) for role in ROLES)]


def hidden(manifest: Manifest) -> Manifest:
    if manifest["kind"] != "Secret":
        return manifest
    shown = {field: value for field, value in manifest.items() if field != "data"}
    return {**shown, "stringData": dict.fromkeys(manifest["data"], HIDDEN)}


def _variables(job: Job, role: Role, keyring: Keyring | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The user's variables for a role, and the keys that all members know."""
    variables = passed(job, environ)
    variables.update({"server": job.env_server, "worker": job.env_worker}.get(role, {}))
    variables = {name: value for name, value in variables.items() if name not in RESERVED}
    known = {} if keyring is None else keyring.variables(role, 0)
    variables.update((name, known[name]) for name in _COMMON if name in known)
    return variables


def _secret(job: Job, name: str, owner: str, values: Mapping[str, str]) -> Manifest:
    data = {key: base64.b64encode(os.fsencode(value)).decode() for key, value in values.items()}
    if sum(map(len, data.values())) > _SECRET_BYTES:
        raise LaunchError(
            f"the values for {name} must fit into the 1 MiB of a Kubernetes Secret; pass less in variables"
        )
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(job, name, owner),
        "type": "Opaque",
        "immutable": True,
        "data": data,
    }


def _service(job: Job, name: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, name, name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {JOB: name, ROLE: "scheduler"},
            "ports": [{"name": "scheduler", "port": PORT}],
        },
    }


def _job(job: Job, name: str, role: Role, keyring: Keyring | None, environ: Mapping[str, str]) -> Manifest:
    count = {"server": job.num_servers, "worker": job.num_workers}.get(role, 1)
    deadline = {"activeDeadlineSeconds": seconds(job.cluster.time)} if job.cluster.time else {}
    mounts, volumes = _mounts(name, role, keyring is not None, bool(_variables(job, role, keyring, environ)))
    pod = {
        "restartPolicy": "Never",
        "subdomain": name,
        "enableServiceLinks": False,  # other people's services are no settings of ours
        "automountServiceAccountToken": False,
        # So that the process is not number 1, to which signals mean nothing, and its orphans are reaped.
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": _GRACE_S,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(job, name, role, mounts)],
        "volumes": volumes,
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job, f"{name}-{role}", name, role),
        "spec": {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            # A process that is gone has failed its job: there is nothing for another in its place to go on with.
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",
            "ttlSecondsAfterFinished": _TTL_S,
            **deadline,
            "template": {"metadata": {"labels": _labels(name, role)}, "spec": pod},
        },
    }


def _container(job: Job, name: str, role: Role, mounts: list[Manifest]) -> Manifest:
    command = job.command if role == "worker" else job.server_argv
    context: Manifest = {"allowPrivilegeEscalation": False}
    if role != "worker":
        context["capabilities"] = {"drop": ["ALL"]}
    container = {
        "name": role,
        "image": job.cluster.image,
        "command": program_argv(job.cluster.python or PYTHON, "launcher.kinds.pods.entry"),
        "args": [_literal(word) for word in command],
        "env": _env(job, name, role),
        "resources": _resources(job.cluster, role),
        "securityContext": context,
        "volumeMounts": mounts,
    }
    return {field: value for field, value in container.items() if value}


def _env(job: Job, name: str, role: Role) -> list[Manifest]:
    at = Rendezvous(f"{name}-scheduler-0.{name}", PORT, name, cluster="kubernetes", node_host=None)
    plain = at.contract(job).variables(role, 0)
    del plain[settings.TASK_ID.name]
    if not job.cluster.encryption:
        plain[settings.ENCRYPTION.name] = "0"
    if cores := _cores(job.cluster, role):
        plain[settings.OMP_NUM_THREADS.name] = str(cores)
    own_address = {"fieldRef": {"fieldPath": "status.podIP"}}
    env = [{"name": settings.NODE_HOST.name, "valueFrom": own_address}]
    if role == "scheduler":
        # Its name is not in the DNS yet when it starts.
        del plain[settings.ROOT_URI.name]
        env.append({"name": settings.ROOT_URI.name, "valueFrom": own_address})
    return env + [{"name": variable, "value": value} for variable, value in plain.items()]


def _mounts(name: str, role: Role, keys: bool, variables: bool) -> tuple[list[Manifest], list[Manifest]]:
    mounts: list[Manifest] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108
    # Containers get 64 MB of it, in which torch's data loaders do not fit.
    volumes: list[Manifest] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if variables:
        mounts.append({"name": "variables", "mountPath": f"{MOUNT}/{VARIABLES}", "readOnly": True})
        volumes.append({"name": "variables", "secret": {"secretName": f"{name}-{role}"}})
    if keys:
        own = f"{role}-$({INDEX})"
        mounts.append({"name": "keys", "mountPath": f"{MOUNT}/{KEY}", "subPathExpr": own, "readOnly": True})
        volumes.append({"name": "keys", "secret": {"secretName": f"{name}-keys"}})
    return mounts, volumes


def _resources(cluster: Cluster, role: Role) -> Manifest:
    memory = {"server": cluster.server_memory, "worker": cluster.worker_memory}.get(role, "")
    limits: Manifest = {}
    if cores := _cores(cluster, role):
        limits["cpu"] = str(cores)
    if memory:
        limits["memory"] = f"{mebibytes(memory)}Mi"  # where we write m, Kubernetes would read thousandths
    if cluster.gpus_per_worker and role == "worker":
        limits["nvidia.com/gpu"] = str(cluster.gpus_per_worker)
    return {"requests": limits, "limits": dict(limits)} if limits else {}


def _cores(cluster: Cluster, role: Role) -> int:
    return {"server": cluster.server_cores, "worker": cluster.worker_cores}.get(role, 0)


def _metadata(job: Job, name: str, owner: str, role: Role | None = None) -> Manifest:
    namespace = {"namespace": job.cluster.namespace} if job.cluster.namespace else {}
    return {"name": name, **namespace, "labels": _labels(owner, role)}


def _labels(name: str, role: Role | None) -> dict[str, str]:
    labels = {"app.kubernetes.io/name": "kvstore", JOB: name}
    return labels if role is None else {**labels, ROLE: cast(str, role)}


def _literal(word: str) -> str:
    """A word with dollar signs escaped: Kubernetes expands `$(NAME)`, and makes one dollar sign of two."""
    try:
        word.encode()
    except UnicodeEncodeError:
        raise LaunchError("the command must be UTF-8 for Kubernetes, and is not") from None
    return word.replace("$", "$$")
