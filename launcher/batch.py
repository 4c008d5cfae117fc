"""A job as text, for cluster managers that queue it: it holds secrets, and travels on standard input alone."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from launcher.cluster import Cluster
from launcher.errors import LaunchError
from launcher.job import Job

_TUPLES = ("command", "env_names", "server_argv", "sync_exclude", "ssh_option", "cluster_option")


def dumps(job: Job) -> str:
    """One line of ASCII."""
    fields = {field.name: getattr(job, field.name) for field in dataclasses.fields(Job)}
    fields["cluster"] = dataclasses.asdict(job.cluster)
    fields["env_server"], fields["env_worker"] = dict(job.env_server), dict(job.env_worker)
    return json.dumps(fields, ensure_ascii=True)


def loads(text: str) -> Job:
    """The job that `dumps` has written.

    Raises:
        LaunchError: it is none.
    """
    try:
        fields = _tuples(json.loads(text))
        return Job(**{**fields, "cluster": Cluster(**_tuples(fields["cluster"]))})
    except (ValueError, TypeError, KeyError, AttributeError):
        raise LaunchError("the description of the job is damaged") from None


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if name in _TUPLES else value for name, value in fields.items()}


def main() -> int:
    """Run the job on standard input in the allocation that this process is in; return its exit code."""
    from launcher.kinds import slurm
    from launcher.report import report

    try:
        return slurm.run_inside(loads(sys.stdin.read()), report)
    except LaunchError as error:
        print(f"launch.py: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
