"""How `launch.py --dry-run` shows environments and commands, without any secret. No I/O."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from kvstore.job import settings
from kvstore.job.contract import Role
from launcher.job.description import Job
from launcher.job.tasks import Rendezvous, member_variables, members, words

HIDDEN = "..."
# The launcher computes these values, and none is a secret. Any other value may be one.
_SHOWN = frozenset(
    setting.name
    for setting in (
        *(settings.ROLE, settings.TASK_ID, settings.NUM_WORKER, settings.NUM_SERVER),
        *(settings.NUM_AGGREGATORS, settings.AGGREGATOR, settings.REPLICAS, settings.READERS, settings.INJECT),
        *(settings.ROOT_URI, settings.ROOT_PORT, settings.NODE_HOST, settings.JOB, settings.CLUSTER),
    )
)


def variables(env: Mapping[str, str]) -> str:
    """An environment in shell syntax. Every value that may be a secret is hidden."""
    return " ".join(f"{name}={shlex.quote(value) if name in _SHOWN else HIDDEN}" for name, value in sorted(env.items()))


def task(job: Job, at: Rendezvous, role: Role, rank: int, python: str) -> str:
    return f"{role} {rank}: {variables(member_variables(job, at, role, rank))} {shlex.join(words(job, role, python))}"


def elsewhere(job: Job, at: Rendezvous, role: Role, rank: int, python: str) -> str:
    """One process on another host as a comment. It inherits only the variables that the job passes on."""
    named = dict.fromkeys(job.env_names, "") | member_variables(job, at, role, rank)
    return f"#   {role} {rank}: {variables(named)} {shlex.join(words(job, role, python))}"


def tasks(job: Job, kind: str, python: str) -> str:
    at = Rendezvous("(this machine)", 0, "(the job)", kind, "(the host)")
    lines = [elsewhere(job, at, role, rank, python) for role, rank in members(job) if role != "scheduler"]
    if job.aggregates and job.num_workers > 1:
        lines.append("#   an aggregator on each host with two workers or more, if the hosts are several")
    return "\n".join(lines)
