"""Why a process ends, told by itself to its supervisor: launch.py, or an agent of it.

The supervisor names a file in the process's environment, and reads it while the process runs and when it has ended. So
it can show one root cause, last, instead of a traceback for each process in the order in which they came.

Whatever a worker starts inherits that environment: an evaluation, a process of a ``DataLoader``. The worker is the
process that first makes a distributed store. It says so beside that file (``Owner``), and no other process is asked.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

from kvstore.errors import ConfigError
from kvstore.job.settings import EXIT_REPORT, VERBOSE, WORKER_PROCESS

log = logging.getLogger(__name__)

MAX_TEXT = 2000  # characters of an error or a place
MAX_CAUSE = 64
MAX_DETAILS = 1 << 16  # characters of a traceback; a longer one is cut in its middle


@dataclass(frozen=True)
class ExitReport:
    """Why one process ends. Texts that are too long are cut, and lone surrogates replaced.

    Attributes:
        error: what happened, as ``ValueError: no data``.
        place: the user's own line where it happened, as ``train.py:13, in step``; empty if there is none.
        details: the traceback; empty if there is none.
        consequence: whether the cause is the failure of another process.
        printed: whether this process prints all of this itself.
        cause: of a consequence, the process whose loss has ended the job, as ``NodeLost`` has it; empty if it is not
            known, or none.
        given_up: at the end of a job that has not failed, the processes that it went on without and that may run for
            ever, each as ``cause`` names one, with commas between them.
    """

    error: str
    place: str = ""
    details: str = ""
    consequence: bool = False
    printed: bool = False
    cause: str = ""
    given_up: str = ""

    def __post_init__(self) -> None:
        for name, longest in _LONGEST.items():
            object.__setattr__(self, name, _readable(getattr(self, name), longest))

    def dumps(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def loads(cls, data: bytes) -> ExitReport:
        """ValueError if ``data`` is not of ``dumps``."""
        values = json.loads(data)
        if not isinstance(values, dict) or {name: type(value).__name__ for name, value in values.items()} != _TYPES:
            raise ValueError("not an exit report")
        return cls(**values)


_LONGEST = {"error": MAX_TEXT, "place": MAX_TEXT, "details": MAX_DETAILS, "cause": MAX_CAUSE, "given_up": MAX_DETAILS}
_TYPES = {field.name: field.type for field in fields(ExitReport)}


class Owner(NamedTuple):
    """The process that is a worker of the job, and when it began, as the system tells; empty if it does not."""

    pid: int
    started: str
    joined: bool = False

    @classmethod
    def of(cls, pid: int) -> Owner:
        return cls(pid, _start_of(pid))

    @property
    def alive(self) -> bool:
        if self.started:  # the number alone may be another process's by now
            return _start_of(self.pid) == self.started
        with contextlib.suppress(OSError):
            os.kill(self.pid, 0)
            return True
        return False


@dataclass(frozen=True)
class ReportFile:
    """Where a process writes its report, and which pipe its supervisor reads.

    Attributes:
        path: the file. It does not exist before the process has something to report.
        device, inode: of the pipe that the supervisor has given to the process as its standard error.
    """

    path: Path
    device: int
    inode: int

    @classmethod
    def of(cls, path: Path, pipe: int) -> ReportFile:
        """For a process that gets the file descriptor ``pipe`` as its standard error."""
        status = os.fstat(pipe)
        return cls(path, status.st_dev, status.st_ino)

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> ReportFile | None:
        """None without a supervisor."""
        device, _, rest = EXIT_REPORT.read(env).partition(":")
        inode, _, path = rest.partition(":")
        return cls(Path(path), int(device), int(inode)) if device.isdigit() and inode.isdigit() and path else None

    @property
    def variables(self) -> dict[str, str]:
        return {EXIT_REPORT.name: f"{self.device}:{self.inode}:{self.path}"}

    def is_stderr(self) -> bool:
        """Whether the supervisor reads what this process writes to standard error."""
        try:
            status = os.fstat(2)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == (self.device, self.inode)

    def write(self, report: ExitReport) -> None:
        """Write the report, whole or not at all; it replaces an earlier one."""
        # The supervisor reads the file while this process runs: it must never see a part of a report.
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        draft.write_bytes(report.dumps())
        draft.replace(self.path)

    def own(self, joined: bool = False) -> Owner | None:
        """Make this process the owner, or return another one that has joined, or lives and may still join."""
        me = Owner(os.getpid(), _start_of(os.getpid()), joined)
        draft = self._owner_path.with_name(f"{self._owner_path.name}.{me.pid}")
        draft.write_text(json.dumps(me))
        try:
            # Of two processes that begin at the same time one must win. A link fails if the name is taken; a
            # replacement would let the second take the place of the first, and both would join.
            os.link(draft, self._owner_path)
        except FileExistsError:
            owner = self.owner
            if owner is not None and owner[:2] != me[:2] and (owner.joined or owner.alive):
                return owner
            draft.replace(self._owner_path)
        finally:
            draft.unlink(missing_ok=True)
        return None

    def clear(self) -> None:
        """Forget the report and the owner: another process takes the place of the one that has ended."""
        for path in (self.path, self._owner_path):
            path.unlink(missing_ok=True)

    @property
    def owner(self) -> Owner | None:
        """None if no process has said that it is the worker."""
        try:
            pid, started, joined = json.loads(self._owner_path.read_bytes())
            return Owner(int(pid), str(started), bool(joined))
        except (OSError, ValueError, TypeError):
            return None

    @property
    def is_ours(self) -> bool:
        """Whether this process is the one that is asked, as far as is known."""
        owner = self.owner
        return owner is None or owner[:2] == (os.getpid(), _start_of(os.getpid()))

    @property
    def _owner_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.owner")

    def read(self) -> ExitReport | None:
        """The report; None if there is none, or something else."""
        try:
            return ExitReport.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return None


def hand_over(report: ExitReport, env: Mapping[str, str]) -> bool:
    """Give the supervisor a report, if there is a supervisor.

    Returns:
        Whether the supervisor shows it. If not, this process has to print it: there is no supervisor, another process
        is the worker, standard error goes elsewhere, or the user wants all tracebacks whole.
    """
    file = ReportFile.from_env(env)
    if file is None or not file.is_ours:
        return False
    try:
        shown = file.is_stderr() and not is_verbose(env)
        file.write(report if shown else replace(report, details="", printed=True))
    except OSError:
        return False
    return shown


def report_consequence(what: str, failure: str, cause: str = "") -> None:
    """Tell the supervisor, or the log, that the failure of another process, ``cause``, ends ``what``."""
    if not hand_over(ExitReport(failure, consequence=True, cause=cause), os.environ):
        log.error("%s: %s", what, failure)


def report_given_up(processes: Sequence[str]) -> None:
    """Tell the supervisor which processes nobody waits for, though they may be alive: they were stopped, or cut off."""
    error = f"the job has ended without {', '.join(processes)}"
    hand_over(ExitReport(error, consequence=True, given_up=", ".join(processes)), os.environ)


def require_own(env: Mapping[str, str], name: str, rank: str = "") -> None:
    """Raise ``ConfigError`` if another process is the worker whose environment this is; else make this process it.

    Args:
        name: of the worker, for the message.
        rank: tells this worker from workers of other jobs, where no ``launch.py`` has started it.
    """
    file = ReportFile.from_env(env)
    try:
        owner = _worker_above(env, rank) if file is None else file.own()
    except OSError:  # nobody can be told then either
        return
    if owner is None:
        return
    known = f"process {owner.pid}"
    state = f"is {known} already" if owner.alive else f"was {known}, which has ended"
    which = "that begin with DMLC_ and KVSTORE_" if file else "by which torchrun, mpirun or srun gives it a rank"
    raise ConfigError(
        f"{name} of this job {state}, and this is process {os.getpid()}: a job has one process for each worker, which "
        "alone makes distributed stores. For another program that makes stores of its own, remove the variables "
        f"{which} from its environment"
    )


def note_joined(env: MutableMapping[str, str], rank: str = "") -> None:
    """Note that this process has joined the job: no other process can take its place now. See ``require_own``."""
    file = ReportFile.from_env(env)
    if file is not None:
        with contextlib.suppress(OSError):
            file.own(joined=True)
    elif rank:  # torchrun and mpirun leave no place for a file, but what this process starts inherits its environment
        me = Owner.of(os.getpid())
        env[WORKER_PROCESS.name] = f"{me.pid}:{me.started}:{rank}"


def _worker_above(env: Mapping[str, str], rank: str) -> Owner | None:
    """Return the process that is worker ``rank``, if this one is another that inherits from it."""
    pid, _, rest = WORKER_PROCESS.read(env).partition(":")
    started, _, its_rank = rest.partition(":")
    if not (rank and pid.isdigit() and its_rank == rank):
        return None  # in a job of its own, which the worker has started with another torchrun
    owner = Owner(int(pid), started, True)
    return None if owner[:2] == Owner.of(os.getpid())[:2] else owner


def _start_of(pid: int) -> str:
    """When a process began, as Linux tells; empty if it has ended, or on other systems."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def is_verbose(env: Mapping[str, str]) -> bool:
    """Whether the user wants every traceback whole. A value that is not valid counts as yes: nothing gets lost."""
    try:
        return VERBOSE.read(env)
    except ConfigError:
        return True


def _readable(text: str, longest: int) -> str:
    if len(text) > longest:
        text = f"{text[: longest // 2 - 10]}\n...\n{text[-(longest // 2 - 10) :]}"
    return text.encode(errors="backslashreplace").decode()
