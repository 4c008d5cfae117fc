"""What a launcher is, and what launchers share: commands of cluster managers, which may not answer, and their units."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvstore.job.processes import source_root
from launcher.errors import NOT_FOUND, LaunchError
from launcher.job.command import agent_argv
from launcher.job.description import Cluster, Job
from launcher.supervision.supervisor import OnFailure

# Fields of ``Cluster`` that all launchers use whose processes are supervised by launch.py, and by it through agents.
SUPERVISED = frozenset(
    {
        "dashboard",
        "dashboard_token_file",
        "trace",
        "host_aggregation",
        "replicas",
        "min_workers",
        "restarts",
        "inject",
        "max_readers",
        "readers",
        "gpus_per_worker",
    }
)
WITH_AGENTS = SUPERVISED | {"python", "host_ip", "interface", "encryption"}


@dataclass(frozen=True)
class Kind:
    """One launcher.

    Args:
        run: runs a job, waits for its end, and returns launch.py's exit code: 0, that of the first process to fail, or
            128 + the signal that ended the job. It calls the other argument once, with the first process that fails and
            how, before the others are ended. It raises LaunchError if the job cannot be started; then none of its
            processes runs.
        dry_run: describes what `run` would do. It reads the files that the job names, and does nothing else. The text
            shows no value of a variable that the user has set, and no key.
    """

    run: Callable[[Job, OnFailure], int]
    dry_run: Callable[[Job], str]
    takes: frozenset[str]  # the fields of `Cluster` that it uses


_TELL_S = 20.0


def agent_words(job: Job) -> list[str]:
    """The words that start an agent on a host.

    A clone here must be at the same path there, by a shared file system. The first message of the agent shows it.
    """
    return agent_argv(job.python, source_root())


def write_private(path: Path, text: str) -> None:
    """Make a file that its owner alone may ever read: with `chmod` afterwards, others could open it before."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def require(kind: str, program: str, where: str) -> str:
    """Return the path of a program that a launcher needs. `where`: what to do if it is not on PATH, for the error."""
    path = shutil.which(program)
    if path is None:
        raise LaunchError(f"--launcher {kind} needs {program} on PATH: {where}", NOT_FOUND)
    return path


def tell(argv: Sequence[str], seconds: float = _TELL_S) -> None:
    """Run a command, and ignore its result.

    It runs in a session of its own, so that a second Ctrl-C does not end it.
    """
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(argv, capture_output=True, timeout=seconds, check=False, start_new_session=True)


_TIME = re.compile(r"(?:(\d+):)?(\d{1,2}):(\d{2})", re.ASCII)
_MEBIBYTES = {"m": 1, "g": 1024}


def largest_memory(cluster: Cluster) -> str:
    """The memory that any process of a job needs, where a manager gives all the same; empty for the default."""
    return max((cluster.worker_memory, cluster.server_memory), key=mebibytes)


def mebibytes(size: str) -> int:
    return 0 if not size else int(size[:-1]) * _MEBIBYTES[size[-1]]


def seconds(time: str) -> int:
    match = _TIME.fullmatch(time)
    total = 0
    for part in match.groups("0") if match else ():
        total = total * 60 + int(part)
    if total < 1:
        raise LaunchError(f"--time {time} is not valid; valid: hours:minutes:seconds, such as 2:00:00")
    return total
