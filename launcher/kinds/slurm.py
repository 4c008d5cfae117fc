"""The Slurm launcher: srun inside an allocation, sbatch outside one.

Inside an allocation, srun starts an agent for each worker and server. launch.py runs on the first node, with the
scheduler.
Outside, launch.py submits a script that runs it inside, and prints the output of that. If it gets a signal, it cancels
the job. The working directory must be on a file system that all nodes share, as is usual with Slurm.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import select
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvstore.job.processes import source_root
from kvstore.rare_log import worth_a_line
from launcher.agents import remote_run as agents
from launcher.agents.fleet import Carrier
from launcher.agents.links.link import ENLIST, AgentTicket
from launcher.agents.manager import ManagerRecruiter
from launcher.errors import LaunchError
from launcher.job import dryrun
from launcher.job.command import program_argv
from launcher.job.description import Cluster, Job, OutputOptions
from launcher.job.tasks import passed
from launcher.kinds.kind import (
    WITH_AGENTS,
    Kind,
    agent_words,
    largest_memory,
    mebibytes,
    require,
    tell,
)
from launcher.processes.guard import LastWill
from launcher.supervision.crew import CHILD, SignalQueue, called
from launcher.supervision.supervisor import OnFailure, report

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


STEP_S = 0.2
_STATE_S = 0.5
NOTICE_S = 30.0
GRACE_S = 8.0  # for launch.py inside the allocation to end the job
CANCEL_S = 10.0
_CHUNK = 1 << 20
_TAKEN = 4096  # bytes that a writable pipe takes without blocking


@dataclass(frozen=True)
class QueueState:
    """The state of a job."""

    text: str  # the state in the manager's words
    running: bool  # whether it has left the queue
    over: bool  # whether it has ended
    status: int  # its exit code, once it is over


@dataclass(frozen=True)
class QueuedJob:
    """A submitted job."""

    title: str
    state: Callable[[], QueueState]  # asks the manager. It may raise LaunchError if the manager does not answer
    interrupt: Callable[[int], None]  # sends a signal to the job's first process
    cancel: tuple[str, ...]  # the command that ends the job, whatever its state
    stdout: Path  # the files that its output goes to
    stderr: Path
    others: tuple[Path, ...] = ()  # other files to remove at the end


class _Tail:
    """A file that another process appends to, and that may not exist yet."""

    def __init__(self, path: Path, target: int) -> None:
        self._path, self._target, self._at = path, target, 0
        self._rest = b""

    def pump(self) -> bool:
        """Write what is new, as much as can be written without blocking, so that signals are still noticed.

        Returns whether all of it was written.
        """
        while self._rest or self._read():
            if not select.select([], [self._target], [], 0)[1]:
                return False
            self._rest = self._rest[os.write(self._target, self._rest[:_TAKEN]) :]
        return True

    def _read(self) -> bool:
        with suppress(OSError), self._path.open("rb") as file:  # a network file system may fail for a moment
            file.seek(self._at)
            self._rest = file.read(_CHUNK)
            self._at += len(self._rest)
        return bool(self._rest)


def follow(submit: Callable[[], QueuedJob], *, ask_s: float = _STATE_S) -> int:
    """Submit a job, print its output, and wait for its end. Cancel it if this process gets a signal, or is killed.

    Returns its exit code, or 128 + the signal.
    """
    with SignalQueue() as signals, selectors.DefaultSelector() as selector:
        selector.register(signals, selectors.EVENT_READ)
        job = submit()
        files = [job.stdout, job.stderr, *job.others]
        will = LastWill(job.cancel, files)
        try:
            return _follow(job, [_Tail(job.stdout, 1), _Tail(job.stderr, 2)], signals, selector, ask_s)
        except BaseException:
            tell(job.cancel, CANCEL_S)  # nothing follows it any more
            raise
        finally:
            will.revoke()
            for path in files:
                with suppress(OSError):
                    path.unlink()


def _follow(
    job: QueuedJob, tails: list[_Tail], signals: SignalQueue, selector: selectors.BaseSelector, ask_s: float
) -> int:
    print(f"launch.py: {job.title} was submitted", file=sys.stderr)
    asked = noticed = time.monotonic()
    state = QueueState("", running=False, over=False, status=0)
    failures = 0
    ended: int | None = None
    deadline = 0.0
    canceled = False
    broken: list[int] = []
    while True:
        selector.select(STEP_S)
        now = time.monotonic()
        received, broken = [*signals.take(), *broken], []
        for signum in received:
            if signum == CHILD:
                continue
            if ended is None:
                ended, deadline = 128 + signum, now + (GRACE_S if state.running else 0.0)
                if state.running:
                    job.interrupt(signum)
            else:
                deadline = now  # a second signal: cancel at once
        if ended is not None and now >= deadline:
            if canceled:
                print(f"launch.py: gave up waiting for {job.title} to end; it was canceled", file=sys.stderr)
                return ended
            canceled, deadline = True, now + CANCEL_S
            tell(job.cancel, CANCEL_S)
        if now >= asked + ask_s:
            asked = now
            try:
                state, failures = job.state(), 0
            except LaunchError as error:
                failures += 1
                if worth_a_line(failures):  # the manager may restart while a job runs
                    print(f"launch.py: {error}", file=sys.stderr)
            if not state.running and not state.over and now >= noticed + NOTICE_S:
                noticed = now
                print(f"launch.py: {job.title} is waiting: {state.text}", file=sys.stderr)
        try:
            for tail in tails:
                tail.pump()
        except BrokenPipeError:  # no reader any more (`| head`): end as by SIGPIPE
            tails, broken = [], [signal.SIGPIPE]
        if state.over:
            # The last output may arrive later than the state, over a network file system.
            time.sleep(STEP_S)
            with suppress(BrokenPipeError):
                while not all([tail.pump() for tail in tails]) and not signals.take():  # noqa: C419 (each must go on)
                    selector.select(STEP_S)
            if canceled and ended is not None:  # else the launch.py in the job says what it has ended
                print(f"launch.py: {called(ended - 128)}: {job.title} was canceled, and has ended", file=sys.stderr)
            if ended is None and state.status:
                print(f"launch.py: {job.title} ended: {state.text}, exit code {state.status}", file=sys.stderr)
            return state.status if ended is None else ended


def run(job: Job, on_failure: OnFailure) -> int:
    if os.environ.get(ALLOCATION):
        return run_inside(job, on_failure)
    return _run_outside(job)


def run_inside(job: Job, on_failure: OnFailure) -> int:
    require("slurm", "srun", _WHERE)

    def submit(ticket: AgentTicket) -> Carrier:
        return Carrier("srun", srun(job), {**os.environ, ENLIST: ticket.text}, linked=False, source="srun")

    toward = _address(first_node(os.environ.get("SLURM_JOB_NODELIST", "")))
    return agents.run(job, on_failure, ManagerRecruiter(job, "srun", submit, toward=toward, patience_s=SRUN_S), "slurm")


def dry_run(job: Job) -> str:
    inside = [
        f"# in the allocation, with {ENLIST}={dryrun.HIDDEN} in the environment:",
        shlex.join(srun(job)),
        dryrun.tasks(job, "slurm", job.python),
    ]
    if os.environ.get(ALLOCATION):
        return "\n".join(inside)
    outside = shlex.join(sbatch(job, str(Path.cwd()), ".kvstore-job"))
    script_text = script(job, f"(the job, with its variables: {dryrun.HIDDEN})").rstrip()
    return "\n".join([outside, "# with this script on standard input:", script_text, *inside])


def srun(job: Job) -> list[str]:
    cluster = job.cluster
    argv = ["srun", f"--ntasks={job.num_placed}", "--kill-on-bad-exit=1", "--input=none"]
    argv += ["--mpi=none", "--unbuffered"]
    if cores := max(cluster.worker_cores, cluster.server_cores):
        argv.append(f"--cpus-per-task={cores}")
    argv += cluster.cluster_option
    return [*argv, *agent_words(job)]


def sbatch(job: Job, directory: str, name: str) -> list[str]:
    """The words that submit a job from outside an allocation. No I/O.

    `directory`: the working directory, where its output goes to `name`.out and `name`.err. `name`: the name of these
    files.
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
    memory = mebibytes(largest_memory(cluster))
    if memory:
        argv.append(f"--mem-per-cpu={-(-memory // max(1, cores))}M")
    if cluster.gpus_per_worker:
        argv.append(f"--gpus={cluster.gpus_per_worker * job.num_workers}")
    return [*argv, *cluster.cluster_option]


def script(job: Job, text: str) -> str:
    """The script that Slurm runs on the first node: launch.py, with the job on its standard input. No I/O."""
    inside = shlex.join(program_argv(job.python, "launcher.kinds.slurm", source_root()))
    return f"#!/bin/sh\nexec {inside} <<'{_END}'\n{text}\n{_END}\n"


def _run_outside(job: Job) -> int:
    require("slurm", "sbatch", _WHERE)
    name = f".kvstore-{secrets.token_hex(6)}"
    directory = Path.cwd()
    out, err, end = (directory / f"{name}.{kind}" for kind in ("out", "err", "end"))

    def submit() -> QueuedJob:
        with _private(out, err, end):
            done = _ask(sbatch(job, str(directory), name), script(job, job_text(job, os.environ, str(end))))
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


_TUPLES = ("command", "env_names", "server_argv", "sync_exclude", "ssh_option", "cluster_option", "inject")


def job_text(job: Job, environ: Mapping[str, str], end: str) -> str:
    """One line of ASCII.

    `environ`: the caller's environment. The text has the variables that the job passes on, because not every site does
    so itself. `end`: an existing file for the exit code. A manager may report the code late, if a host does not answer
    it.
    """
    fields = {field.name: getattr(job, field.name) for field in dataclasses.fields(Job)}
    fields["cluster"], fields["output"] = dataclasses.asdict(job.cluster), dataclasses.asdict(job.output)
    fields["env_server"], fields["env_worker"] = dict(job.env_server), dict(job.env_worker)
    return json.dumps([fields, passed(job, environ), end], ensure_ascii=True)


def job_of(text: str) -> tuple[Job, dict[str, str], str]:
    """Read a text of `job_text`.

    Returns the job, the variables of the caller's environment, and the file for the exit code.
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


def main() -> int:
    """Run the job on standard input in this allocation, as the script of sbatch does, and return its exit code."""
    try:
        job, variables, end = job_of(sys.stdin.read())
    except LaunchError as error:
        print(f"launch.py: {error}", file=sys.stderr)
        return error.exit_code
    os.environ.update(variables)
    try:
        code = run_inside(job, report)
    except LaunchError as error:
        print(f"launch.py: {error}", file=sys.stderr)
        code = error.exit_code
    with suppress(OSError), Path(end).open("r+") as file:  # the file is gone if launch.py outside has exited
        file.write(f"{code}\n")
    return code


KIND = Kind(
    run=run,
    dry_run=dry_run,
    takes=WITH_AGENTS
    | {"job_name", "queue", "time", "worker_cores", "server_cores", "worker_memory", "server_memory", "cluster_option"},
)
