"""The Kubernetes launcher: all processes of a job are pods, which kubectl creates.

It has been tested with a stand-in for kubectl, and never on a real cluster. It needs Kubernetes 1.28 for
`podReplacementPolicy`.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvstore.job.curve_keys import Keyring
from launcher.job.description import Job
from launcher.job.tasks import Task, members, words
from launcher.kinds.kind import Kind
from launcher.kinds.pods.kubectl import Kubectl
from launcher.kinds.pods.manifests import PYTHON, hidden, manifests
from launcher.kinds.pods.pod_crew import PodCrew
from launcher.supervision.crew import SignalQueue
from launcher.supervision.ending import EndingLimits
from launcher.supervision.supervisor import OnFailure, Supervisor

# The state of pods is read once a second, and the cluster gives a pod time to end.
LIMITS = EndingLimits(window=12.0, linger=10.0, patience=20.0, blame=20.0, grace=15.0, short_grace=15.0, kill=15.0)
_TOKEN_BYTES = 3
_PREFIX = 33  # with a dash and the token 40 characters, the longest name of a job


def run(
    job: Job,
    on_failure: OnFailure,  # noqa: ARG001
    *,
    environ: Mapping[str, str] | None = None,
    limits: EndingLimits | None = None,
) -> int:
    """Run a job in the cluster, and wait for its end. Main thread only, because of the signals.

    `on_failure` is not called: the scheduler cannot be reached from here, and notices failures by itself. `environ`:
    the environment with the job's `env_names`; None for that of this process. Returns the exit code, as a `Kind` does.
    """
    environ = dict(os.environ) if environ is None else environ
    name = f"{job.cluster.job_name[:_PREFIX].rstrip('-')}-{secrets.token_hex(_TOKEN_BYTES)}"
    keyring = Keyring.random(members(job)) if job.cluster.encryption else None
    objects = {"apiVersion": "v1", "kind": "List", "items": manifests(job, name, keyring, environ)}
    tasks = [Task(role, rank, words(job, role, PYTHON), {}) for role, rank in members(job)]
    with SignalQueue() as signals:
        pods = PodCrew(Kubectl(job.cluster.namespace), name, tasks, json.dumps(objects))
        supervisor = Supervisor(
            tasks, [pods], signals, lambda *_: None, environ=environ, limits=limits or LIMITS, output=job.output
        )
        try:
            supervisor.start()
            return supervisor.run()
        finally:
            supervisor.close()


def dry_run(job: Job) -> str:
    """The objects that `run` would create, as YAML, for `kubectl create --dry-run=client -f -`."""
    keyring = Keyring.random(members(job)) if job.cluster.encryption else None
    name = f"{job.cluster.job_name[:_PREFIX].rstrip('-')}-xxxxxx"
    shown = [dump(hidden(manifest)) for manifest in manifests(job, name, keyring, os.environ)]
    return "---\n" + "---\n".join(shown).rstrip("\n")


KIND = Kind(
    run=run,
    dry_run=dry_run,
    takes=frozenset(
        {
            "encryption",
            "host_aggregation",
            "gpus_per_worker",
            "image",
            "job_name",
            "namespace",
            "python",
            "server_cores",
            "server_memory",
            "time",
            "worker_cores",
            "worker_memory",
        }
    ),
)


_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*", re.ASCII)
_WORDS = frozenset(["false", "n", "no", "null", "off", "on", "true", "y", "yes"])


def dump(value: Any) -> str:
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> Iterator[str]:
    if value and isinstance(value, Mapping):
        for name, part in value.items():
            lines = list(_lines(part))
            if isinstance(part, (Mapping, list, tuple)) and part:
                yield f"{_scalar(name)}:"
                yield from lines if not isinstance(part, Mapping) else (f"  {line}" for line in lines)
            else:
                yield f"{_scalar(name)}: {lines[0]}"
    elif value and isinstance(value, Sequence) and not isinstance(value, str):
        for part in value:
            for number, line in enumerate(_lines(part)):
                yield f"{'- ' if number == 0 else '  '}{line}"
    else:
        yield _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    # JSON is YAML, except for characters above 16 bits, which JSON escapes as two.
    return json.dumps(value, ensure_ascii=False)
