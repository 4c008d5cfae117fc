"""The YARN launcher: all processes of a job run in containers of a Hadoop cluster, by YARN's distributed shell.

The distributed shell runs one script in several containers that are all alike. The script starts an agent, which
connects to launch.py and gets its role. The script holds the ticket of the agents, so only this user can read it, here
and in HDFS, and its content is on no command line.

It was written from Hadoop's documentation and source, and has never run on a real cluster.
"""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.agents import remote_run as agents
from launcher.agents.fleet import Carrier
from launcher.agents.links.link import ENLIST, AgentTicket
from launcher.agents.manager import ManagerRecruiter
from launcher.errors import LaunchError
from launcher.job import dryrun
from launcher.job.description import Job
from launcher.kinds.kind import (
    WITH_AGENTS,
    Kind,
    agent_words,
    largest_memory,
    mebibytes,
    require,
    seconds,
    write_private,
)
from launcher.supervision.supervisor import OnFailure

CLIENT = "org.apache.hadoop.yarn.applications.distributedshell.Client"
TAKES = WITH_AGENTS | {
    "job_name",
    "queue",
    "server_cores",
    "server_memory",
    "time",
    "worker_cores",
    "worker_memory",
    "yarn_jar",
}
_JAR = "hadoop-yarn-applications-distributedshell*.jar"
_FOREVER_MS = (1 << 31) - 1  # the longest time limit, 24 days; the default is ten minutes
_CLASSPATH_S = 60.0
_SHOWN_JAR, _SHOWN_SCRIPT = "(the distributed shell)", "(a private file)"


def render(job: Job, containers: int, script_path: str, jar: str, name: str = "") -> list[str]:
    """The words that start the agents, one in each container. All containers have the size of the largest process.

    `script_path`: the path of the file with the text of `script`. `jar`: the path of the distributed shell. `name`: the
    name of the job in YARN, and of the directory in HDFS with the script; if empty, the name of the job.
    """
    cluster = job.cluster
    argv = ["yarn", "jar", jar, CLIENT, "-jar", jar, "-appname", name or cluster.job_name]
    argv += ["-num_containers", str(containers), "-shell_script", script_path]
    if memory := mebibytes(largest_memory(cluster)):
        argv += ["-container_memory", str(memory)]
    if cores := max(cluster.worker_cores, cluster.server_cores):
        argv += ["-container_vcores", str(cores)]
    if cluster.gpus_per_worker:
        argv += ["-container_resources", f"yarn.io/gpu={cluster.gpus_per_worker}"]
    if cluster.queue:
        argv += ["-queue", cluster.queue]
    time_ms = seconds(cluster.time) * 1000 if cluster.time else _FOREVER_MS
    return [*argv, "-timeout", str(min(time_ms, _FOREVER_MS))]


def script(job: Job, ticket: str) -> str:
    """The script of each container. It is a secret, as the ticket is, which lets an agent in."""
    return f"#!/bin/sh\nexport {ENLIST}={shlex.quote(ticket)}\nexec {shlex.join(agent_words(job))}\n"


def prepare(name: str) -> list[list[str]]:
    """Commands to run first. The distributed shell itself would put the script where all users can read it."""
    return [["hdfs", "dfs", "-mkdir", "-p", name], ["hdfs", "dfs", "-chmod", "700", name]]


def clean(name: str) -> list[list[str]]:
    """Commands to run when the job is over. Nothing else removes the script from HDFS."""
    return [["hdfs", "dfs", "-rm", "-r", "-f", "-skipTrash", name]]


def find_jar(given: str, environ: Mapping[str, str]) -> str:
    """The path of the distributed shell. `given`: where the user says it is."""
    if given:
        if not Path(given).is_file():
            raise LaunchError(f"--yarn-jar {given}: there is no such file")
        return given
    homes = [Path(environ[name]) for name in ("HADOOP_YARN_HOME", "HADOOP_HOME") if environ.get(name)]
    places = [folder for home in homes for folder in (home / "share/hadoop/yarn", home)]
    jar = _jar_in(places) or _jar_in(_classpath(environ))
    if jar is None:
        raise LaunchError(f"cannot find {_JAR} in HADOOP_HOME or `yarn classpath`; name it with --yarn-jar")
    return str(jar)


def _jar_in(places: Iterable[Path]) -> Path | None:
    for place in places:
        jars = [jar for jar in sorted(place.glob(_JAR)) if not jar.stem.endswith(("-sources", "-tests"))]
        if jars:
            return jars[-1]
    return None


def _classpath(environ: Mapping[str, str]) -> list[Path]:
    try:
        done = subprocess.run(
            ["yarn", "classpath"], env=environ, capture_output=True, text=True, timeout=_CLASSPATH_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    entries = [Path(entry) for entry in done.stdout.strip().split(os.pathsep) if entry]
    return [entry.parent if entry.name == "*" or entry.suffix == ".jar" else entry for entry in entries]


def run(job: Job, on_failure: OnFailure) -> int:
    for program in ("yarn", "hdfs"):
        require("yarn", program, "run launch.py where Hadoop's tools are")
    cluster = job.cluster
    jar = find_jar(cluster.yarn_jar, os.environ)
    name = f"{cluster.job_name}-{secrets.token_hex(3)}"
    count = job.num_placed
    with tempfile.TemporaryDirectory(prefix="kvstore-yarn-") as directory:
        path = Path(directory) / "agent.sh"

        def submit(ticket: AgentTicket) -> Carrier:
            write_private(path, script(job, ticket.text))
            _call(prepare(name), strict=True)
            return Carrier(
                "yarn", render(job, count, str(path), jar, name), dict(os.environ), linked=False, source="yarn"
            )

        # A container sees its own GPUs alone: there is nothing left to divide.
        plain = replace(job, cluster=replace(cluster, gpus_per_worker=0))
        try:
            return agents.run(plain, on_failure, ManagerRecruiter(plain, "yarn", submit, patience_s=None), "yarn")
        finally:
            _call(clean(name), strict=False)


def _call(commands: Sequence[Sequence[str]], *, strict: bool) -> None:
    for words in commands:
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_CLASSPATH_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            text = str(error)
        else:
            text = done.stderr.strip() if done.returncode else ""
        if text and strict:
            raise LaunchError(f"{shlex.join(words)} failed: {text}", exit_code=1)


def dry_run(job: Job) -> str:
    name = f"{job.cluster.job_name}-xxxxxx"
    jar = job.cluster.yarn_jar or _SHOWN_JAR
    containers = job.num_placed
    commands: Sequence[Sequence[str]] = [
        *prepare(name),
        render(job, containers, _SHOWN_SCRIPT, jar, name),
        *clean(name),
    ]
    lines = [shlex.join(words) for words in commands]
    processes = dryrun.tasks(job, "yarn", job.python)
    return "\n".join(["# scheduler: on this machine", f"# {containers} agents, started by:", *lines, processes])


KIND = Kind(run=run, dry_run=dry_run, takes=TAKES)
