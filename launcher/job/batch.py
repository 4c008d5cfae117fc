"""A job as text, for cluster managers that queue it. The text holds secrets and must only go to standard input."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from launcher.errors import LaunchError
from launcher.job.cluster import Cluster
from launcher.job.description import Job
from launcher.job.output_options import OutputOptions
from launcher.job.tasks import passed

_TUPLES = ("command", "env_names", "server_argv", "sync_exclude", "ssh_option", "cluster_option", "inject")


def dumps(job: Job, environ: Mapping[str, str], end: str) -> str:
    """One line of ASCII.

    Args:
        job: the job.
        environ: the caller's environment. The text has the variables that the job passes on, because not every site
            does so itself.
        end: an existing file for the exit code. A manager may report the code late, if a host does not answer it.
    """
    fields = {field.name: getattr(job, field.name) for field in dataclasses.fields(Job)}
    fields["cluster"], fields["output"] = dataclasses.asdict(job.cluster), dataclasses.asdict(job.output)
    fields["env_server"], fields["env_worker"] = dict(job.env_server), dict(job.env_worker)
    return json.dumps([fields, passed(job, environ), end], ensure_ascii=True)


def loads(text: str) -> tuple[Job, dict[str, str], str]:
    """Read a text of `dumps`.

    Returns:
        The job, the variables of the caller's environment, and the file for the exit code.

    Raises:
        LaunchError: the text is not one of `dumps`.
    """
    try:
        fields, variables, end = json.loads(text)
        cluster = Cluster(**_tuples(fields["cluster"]))
        output = fields["output"]
        shown = None if output["show"] is None else tuple(output["show"])
        options = OutputOptions(**{**output, "show": shown})
        return Job(**{**_tuples(fields), "cluster": cluster, "output": options}), dict(variables), str(end)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise LaunchError("the job on standard input cannot be read; only launch.py writes it") from None


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if name in _TUPLES else value for name, value in fields.items()}
