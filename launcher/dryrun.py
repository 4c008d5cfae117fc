"""What `launch.py --dry-run` shows of environments and commands. Pure, and without a secret."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

from launcher.job import Job
from launcher.tasks import Rendezvous, members, settings, words

HIDDEN = "..."
# The values of these are computed and harmless; of no others does anybody here know what they hold.
_SHOWN = (
    "DMLC_JOB_CLUSTER",
    "DMLC_NODE_HOST",
    "DMLC_NUM_SERVER",
    "DMLC_NUM_WORKER",
    "DMLC_PS_ROOT_PORT",
    "DMLC_PS_ROOT_URI",
    "DMLC_ROLE",
    "DMLC_TASK_ID",
    "KVSTORE_JOB",
)


def variables(env: Mapping[str, str]) -> str:
    """An environment as a shell would be given it, with every value hidden that may be a secret."""
    return " ".join(f"{name}={shlex.quote(value) if name in _SHOWN else HIDDEN}" for name, value in sorted(env.items()))


def command(argv: Iterable[str]) -> str:
    """A command as one would type it."""
    return shlex.join(argv)


def tasks(job: Job, kind: str, python: str) -> str:
    """The processes of a job whose places a manager decides, as comments, a line each."""
    at = Rendezvous("(this machine)", 0, "(the job)", kind, "(the host)")
    return "\n".join(
        f"#   {role} {rank}: {variables(dict.fromkeys(job.env_names, '') | settings(job, at, role, rank))} "
        f"{command(words(job, role, python))}"
        for role, rank in members(job)
        if role != "scheduler"
    )
