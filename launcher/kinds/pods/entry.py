"""``kvstore-pod``: the first program in a container. It completes the environment and executes the member.

The pods of one Kubernetes Job are all told the same. Each finds out here which of them it is. What ``launch.py`` has
started takes its variables from files of a mounted Secret: so no value is subject to anybody's quoting, and none shows
in the pod's description. Where somebody else has written the manifest, such as a JobSet, each pod makes its keys from a
secret that all have.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from kvstore.bootstrap.job_address import require_safe
from kvstore.errors import ConfigError
from kvstore.job import settings
from kvstore.job.config import Config
from kvstore.job.contract import Role, members
from kvstore.job.curve_keys import Keyring, pair
from kvstore.job.directory import make_private, temporary_root
from kvstore.job.place import FILE, ObservingPlace
from kvstore.job.settings import OBSERVER_KEY
from kvstore.job.system import cores
from launcher.errors import LaunchError
from launcher.job.command import argv_of
from launcher.job.tasks import HostEnvironment, Task, environment, our_servers
from launcher.processes.child import cannot_start

MOUNT = "/etc/kvstore"
VARIABLES = "variables"  # a directory of files, one for each
KEY = "key"  # this process's own
INDEX = "JOB_COMPLETION_INDEX"  # set by Kubernetes in Indexed Jobs
# Pulling an image may take minutes, and no member starts before all have their image.
TIMEOUT_S = 600


def main(argv: Sequence[str] | None = None, mount: str = MOUNT) -> int:
    """Execute the member that this pod is. The words are a worker's command; none are a server or the scheduler.

    Returns the exit code, if it cannot be executed.
    """
    task = compose(sys.argv[1:] if argv is None else argv, os.environ, Path(mount))
    env = dict(task.env)
    if task.role == "scheduler":
        env.update(observers_variables(env))
    try:
        os.execvpe(task.argv[0], task.argv, env)  # noqa: S606
    except OSError as error:
        why = cannot_start(task, error)
        print(why, file=sys.stderr)
        return why.exit_code


def compose(command: Sequence[str], environ: Mapping[str, str], mount: Path) -> Task:
    """The task of this pod, with its whole environment. Raises SystemExit, with the reason, if it cannot be known.

    `command`: the worker's command; empty for a server or the scheduler. `environ`: the container's environment, which
    has the role and the number. `mount`: the directory of the Secrets.
    """
    for name in (settings.ROLE.name, INDEX):
        if not environ.get(name):
            raise SystemExit(f"kvstore-pod: {name} is not set; the manifest sets the role, an Indexed Job the number")
    role, rank = cast(Role, environ[settings.ROLE.name]), int(environ[INDEX])
    timeout_s = environ.get(settings.JOIN_TIMEOUT_S.name, str(TIMEOUT_S))
    variables = {settings.JOIN_TIMEOUT_S.name: timeout_s, **_variables(mount / VARIABLES)}
    variables[settings.TASK_ID.name] = str(rank)
    if role == "scheduler" and environ.get(settings.NODE_HOST.name):
        # Others know it by its name, which is not in the DNS yet when it starts.
        variables[settings.ROOT_URI.name] = environ[settings.NODE_HOST.name]
    if (mount / KEY).exists():
        variables[settings.SECRET_KEY.name] = (mount / KEY).read_text(encoding="ascii")
    elif environ.get(settings.JOB_SECRET.name):
        environ = dict(environ)
        variables.update(_derived_keys(environ, role, rank))
        del environ[settings.JOB_SECRET.name]  # the member needs no other keys
    around = HostEnvironment(environ=environ, python=sys.executable, cores=cores())
    try:
        argv = argv_of(command, sys.executable) if command else our_servers(sys.executable, role, rank)
    except LaunchError as error:
        raise SystemExit(str(error)) from None
    return Task(role, rank, argv, environment(around, role, 1, variables))


def _derived_keys(environ: Mapping[str, str], role: Role, rank: int) -> dict[str, str]:
    """The keys that this member makes from the secret that all pods have."""
    try:
        config = Config.from_env(environ)
        secret = require_safe(config, one_host=False)
    except ConfigError as error:
        raise SystemExit(f"kvstore-pod: {error}") from None
    everyone = members(config.num_workers, config.num_servers)
    if (role, rank) not in everyone:
        raise SystemExit(
            f"kvstore-pod: this pod is number {rank} of the {role}s, counted from 0, but DMLC_NUM_WORKER is "
            f"{config.num_workers} and DMLC_NUM_SERVER is {config.num_servers}; set them to the parallelism of the Jobs"
        )
    return Keyring.derived(secret, config.job, everyone).variables(role, rank) if secret else {}


def _variables(directory: Path) -> dict[str, str]:
    if not directory.is_dir():
        return {}
    # The kubelet's own entries begin with two dots.
    files = [entry for entry in directory.iterdir() if not entry.name.startswith("..")]
    return {file.name: os.fsdecode(file.read_bytes()) for file in files}


def observers_variables(env: Mapping[str, str], root: Path | None = None) -> dict[str, str]:
    """Write the file for observers into a private directory; return what the scheduler must know of them.

    The key is made here, and known to this pod alone. If the file cannot be written, as where nothing is writable, the
    job runs without observers. `env`: the environment of the scheduler, whose process this one becomes.
    """
    try:
        config = Config.from_env(env)
        public, secret = ("", "") if config.keys is None else pair()
        place = ObservingPlace(
            *(config.root, secret, config.transport),
            job=config.job,
            launcher="pod",
            pid=os.getpid(),
            started=time.time(),
            workers=config.num_workers,
            servers=config.num_servers,
        )
        place.write(make_private(root or temporary_root()) / FILE, durable=False)
    except (ConfigError, OSError):  # the scheduler itself says what is wrong with its settings
        return {}
    return {OBSERVER_KEY.name: public} if public else {}
