"""The Slurm launcher: srun inside an allocation, sbatch outside one.

Inside an allocation, srun starts an agent for each worker and server. launch.py runs on the first node, with the
scheduler.
Outside, launch.py submits a script that runs it inside, and prints the output of that. If it gets a signal, it cancels
the job. The working directory must be on a file system that all nodes share, as is usual with Slurm.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from kvstore.job.processes import source_root
from launcher.agents import boot
from launcher.agents import run as agents
from launcher.agents.carrier import Carrier
from launcher.agents.links.ticket import ENLIST, AgentTicket
from launcher.agents.manager import Manager, ManagerRecruiter
from launcher.errors import LaunchError
from launcher.job import batch, dryrun
from launcher.job.description import Job
from launcher.kinds.kind import WITH_AGENTS, Kind
from launcher.kinds.managers.programs import require, tell
from launcher.kinds.managers.queued import QueuedJob, QueueState, follow
from launcher.kinds.managers.units import mebibytes
from launcher.supervision.supervisor import OnFailure

ALLOCATION = "SLURM_JOB_ID"
SRUN_S = 120.0
_SIGNALLED = 128
_SIGNALS = 64  # larger numbers are Slurm's own
_ASK_S = 20.0
_WHERE = "run launch.py where Slurm's tools are"
_END = "KVSTORE_END_OF_JOB"
_UNKNOWN = "Invalid job id"  # Slurm forgets a job minutes after its end
# fmt: off
_DONE = frozenset([
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
])
# fmt: on


def run(job: Job, on_failure: OnFailure) -> int:
    """Run a job in the allocation of this process, or in a new one; see `Kind`."""
    if os.environ.get(ALLOCATION):
        return run_inside(job, on_failure)
    return _run_outside(job)


def run_inside(job: Job, on_failure: OnFailure) -> int:
    """Run a job in this allocation."""
    require("slurm", "srun", _WHERE)

    def submit(ticket: AgentTicket) -> Carrier:
        return Carrier("srun", srun(job), {**os.environ, ENLIST: ticket.text}, linked=False, source="srun")

    toward = _address(first_node(os.environ.get("SLURM_JOB_NODELIST", "")))
    return agents.run(job, on_failure, ManagerRecruiter(job, Manager("srun", submit, toward, SRUN_S)), "slurm")


def dry_run(job: Job) -> str:
    """What `run` would do."""
    inside = [
        f"# in the allocation, with {ENLIST}={dryrun.HIDDEN} in the environment:",
        dryrun.command(srun(job)),
        dryrun.tasks(job, "slurm", job.cluster.python or sys.executable),
    ]
    if os.environ.get(ALLOCATION):
        return "\n".join(inside)
    outside = dryrun.command(sbatch(job, str(Path.cwd()), ".kvstore-job"))
    script_text = script(job, f"(the job, with its variables: {dryrun.HIDDEN})").rstrip()
    return "\n".join([outside, "# with this script on standard input:", script_text, *inside])


def srun(job: Job) -> list[str]:
    """The words that start the agents, inside an allocation. No I/O."""
    cluster = job.cluster
    argv = ["srun", f"--ntasks={job.num_placed}", "--kill-on-bad-exit=1", "--input=none"]
    argv += ["--mpi=none", "--unbuffered"]
    if cores := max(cluster.worker_cores, cluster.server_cores):
        argv.append(f"--cpus-per-task={cores}")
    argv += cluster.cluster_option
    return [*argv, *boot.argv(cluster.python or sys.executable, source_root())]


def sbatch(job: Job, directory: str, name: str) -> list[str]:
    """The words that submit a job from outside an allocation. No I/O.

    Args:
        job: the job.
        directory: the working directory, where its output goes to `name`.out and `name`.err.
        name: the name of these files.
    """
    cluster = job.cluster
    files = f"{directory}/{name}".replace("%", "%%")  # Slurm would replace %j
    argv = [
        "sbatch",
        "--parsable",
        f"--job-name={cluster.job_name}",
        f"--ntasks={job.num_placed}",
        f"--chdir={directory}",
        f"--output={files}.out",
        f"--error={files}.err",
        "--open-mode=truncate",
        "--no-requeue",
    ]
    if cluster.queue:
        argv.append(f"--partition={cluster.queue}")
    if cluster.time:
        argv.append(f"--time={cluster.time}")
    cores = max(cluster.worker_cores, cluster.server_cores)
    if cores:
        argv.append(f"--cpus-per-task={cores}")
    memory = max(mebibytes(cluster.worker_memory), mebibytes(cluster.server_memory))
    if memory:
        argv.append(f"--mem-per-cpu={-(-memory // max(1, cores))}M")
    if cluster.gpus_per_worker:
        argv.append(f"--gpus={cluster.gpus_per_worker * job.num_workers}")
    return [*argv, *cluster.cluster_option]


def script(job: Job, text: str) -> str:
    """The script that Slurm runs on the first node: launch.py, with the job on its standard input. No I/O."""
    inside = dryrun.command(
        boot.run(job.cluster.python or sys.executable, "launcher.kinds.slurm_inside", source_root())
    )
    return f"#!/bin/sh\nexec {inside} <<'{_END}'\n{text}\n{_END}\n"


def _run_outside(job: Job) -> int:
    require("slurm", "sbatch", _WHERE)
    name = f".kvstore-{secrets.token_hex(6)}"
    directory = Path.cwd()
    out, err, end = (directory / f"{name}.{kind}" for kind in ("out", "err", "end"))

    def submit() -> QueuedJob:
        with _private(out, err, end):
            done = _ask(sbatch(job, str(directory), name), script(job, batch.dumps(job, os.environ, str(end))))
            number = done.strip().partition(";")[0]
            if not number.isdigit():
                raise LaunchError(f"expected a job number from sbatch, got {done.strip()!r}", exit_code=1)
        return QueuedJob(
            title=f"Slurm job {number}",
            state=lambda: _state(number, end),
            interrupt=lambda signum: tell(["scancel", "--batch", f"--signal={signum}", number]),
            cancel=("scancel", number),
            stdout=out,
            stderr=err,
            others=(end,),
        )

    return follow(submit)


@contextmanager
def _private(*files: Path) -> Iterator[None]:
    """Make files that their owner alone may read, and remove them if the block fails.

    Output has the token of the job's page, and Slurm would make files that others may read.

    Raises:
        LaunchError: they cannot be made.
    """
    try:
        for file in files:
            file.touch(mode=0o600)
        yield
    except BaseException as error:
        for file in files:
            with suppress(OSError):
                file.unlink()
        if isinstance(error, OSError):
            raise LaunchError(f"cannot write {error.filename}: {error.strerror}", exit_code=1) from None
        raise


def _state(number: str, end: Path) -> QueueState:
    try:
        current = state(_ask(["scontrol", "--oneliner", "show", "job", number]))
        # COMPLETING lasts for minutes if a node does not answer Slurm, and launch.py inside knows the exit code before.
        # After a signal, Slurm knows more: whether it was the time limit, or a user.
        if current.text.startswith("COMPLETING") and (said := _read(end)).isdigit() and int(said) < _SIGNALLED:
            return replace(current, over=True, status=int(said))
        return current
    except LaunchError as error:
        if _UNKNOWN in str(error):
            return QueueState("Slurm has forgotten it", running=False, over=True, status=1)
        raise


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def state(shown: str) -> QueueState:
    """Read the output of `scontrol show job`. No I/O."""
    fields = dict(re.findall(r"(?:^|\s)(JobState|ExitCode|Reason)=(\S+)", shown))
    name = fields.get("JobState", "UNKNOWN")
    code, _, signum = fields.get("ExitCode", "0:0").partition(":")
    killed = int(signum) if signum.isdigit() and int(signum) <= _SIGNALS else 0
    status = 128 + killed if killed else int(code) if code.isdigit() else 1
    over = name.split("+")[0] in _DONE
    return QueueState(
        text=name + (f" ({fields['Reason']})" if fields.get("Reason", "None") != "None" else ""),
        running=name in ("RUNNING", "COMPLETING"),
        over=over,
        status=(status or (0 if name == "COMPLETED" else 1)) if over else 0,
    )


def first_node(nodes: str) -> str:
    """The first node of a list such as `node[03-07,9],other1`; empty if there is none. No I/O."""
    match = re.match(r"(?:[^\[,]|\[[^\]]*\])*", nodes)
    return "" if match is None else re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", match[0])


def _address(node: str) -> str:
    """The address of a node. Its name may be known to Slurm alone."""
    if not node:
        return ""
    try:
        match = re.search(r"\bNodeAddr=(\S+)", _ask(["scontrol", "--oneliner", "show", "node", node]))
    except LaunchError:
        return node
    return node if match is None else match[1]


def _ask(argv: list[str], text: str = "") -> str:
    try:
        # In a session of its own: Ctrl-C must not end it, because launch.py must get the number of the job.
        done = subprocess.run(
            argv, input=os.fsencode(text), capture_output=True, timeout=_ASK_S, check=False, start_new_session=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{argv[0]} does not answer: {error}", exit_code=1) from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise LaunchError(f"{argv[0]} failed: {said or done.returncode}", exit_code=1)
    return done.stdout.decode(errors="replace")


KIND = Kind(
    run=run,
    dry_run=dry_run,
    takes=WITH_AGENTS
    | {"job_name", "queue", "time", "worker_cores", "server_cores", "worker_memory", "server_memory", "cluster_option"},
)
