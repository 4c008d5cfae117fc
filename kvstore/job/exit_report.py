"""Why a process ends, told by itself to its supervisor: launch.py, or an agent of it.

The supervisor names a file in the process's environment, and reads it while the process runs and when it has ended. So
it can show one root cause, last, instead of a traceback for each process in the order in which they came.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.job.settings import EXIT_REPORT, VERBOSE

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
    """

    error: str
    place: str = ""
    details: str = ""
    consequence: bool = False
    printed: bool = False
    cause: str = ""

    def __post_init__(self) -> None:
        for name, longest in _LONGEST.items():
            object.__setattr__(self, name, _readable(getattr(self, name), longest))

    def dumps(self) -> bytes:
        """The content of a file with this report."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def loads(cls, data: bytes) -> ExitReport:
        """The report that ``dumps`` has made.

        Raises:
            ValueError: it is not one.
        """
        values = json.loads(data)
        if not isinstance(values, dict) or {name: type(value).__name__ for name, value in values.items()} != _TYPES:
            raise ValueError("not an exit report")
        return cls(**values)


_LONGEST = {"error": MAX_TEXT, "place": MAX_TEXT, "details": MAX_DETAILS, "cause": MAX_CAUSE}
_TYPES = {field.name: field.type for field in fields(ExitReport)}


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
        """The one that ``variables`` has put there; None without a supervisor."""
        device, _, rest = EXIT_REPORT.read(env).partition(":")
        inode, _, path = rest.partition(":")
        return cls(Path(path), int(device), int(inode)) if device.isdigit() and inode.isdigit() and path else None

    @property
    def variables(self) -> dict[str, str]:
        """What tells the process of it."""
        return {EXIT_REPORT.name: f"{self.device}:{self.inode}:{self.path}"}

    def is_stderr(self) -> bool:
        """Whether the supervisor reads what this process writes to standard error."""
        try:
            status = os.fstat(2)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == (self.device, self.inode)

    def write(self, report: ExitReport) -> None:
        """Write the report, whole or not at all. A second one replaces the first."""
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        draft.write_bytes(report.dumps())
        draft.replace(self.path)

    def read(self) -> ExitReport | None:
        """The report; None if there is none, or something else."""
        try:
            return ExitReport.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return None


def hand_over(report: ExitReport, env: Mapping[str, str]) -> bool:
    """Give the supervisor a report, if there is a supervisor.

    Args:
        report: why this process ends.
        env: this process's environment.

    Returns:
        Whether the supervisor shows it. If not, this process has to print it. The supervisor does not show it if there
        is none, if it does not read this process's standard error, or if the user wants all tracebacks whole.
    """
    file = ReportFile.from_env(env)
    if file is None:
        return False
    try:
        shown = file.is_stderr() and not is_verbose(env)
        file.write(report if shown else replace(report, details="", printed=True))
    except OSError:
        return False
    return shown


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
