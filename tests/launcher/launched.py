"""A launch.py that runs on this machine: how tests start it, and what they see of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from waiting import LONG

ROOT = Path(__file__).resolve().parents[2]

# launch.py with other servers and, mostly, more haste.
DRIVER = """
import dataclasses, json, os, sys
from launcher import cli
from launcher.kinds import local
from launcher.supervision.ending import EndingLimits
from launcher.errors import LaunchError
from launcher.kinds.kind import Kind
from launcher.launch import main
import launcher.launch as entry

def run(job, on_failure):
    job = dataclasses.replace(job, server_argv=(sys.executable, "-S", "-c", os.environ["FAKE_SERVER"]))
    return local.run(job, on_failure, limits=EndingLimits(**json.loads(os.environ["LIMITS"])))

def on_failure(task, how):
    if note := os.environ.get("NOTE_FAILURE"):
        open(note, "a").write(f"{task.name} {how} {task.env['DMLC_PS_ROOT_URI']}\\n")
    if os.environ.get("FAIL_TO_TELL"):
        raise OSError("nobody home")

entry.find = lambda kind, job: Kind(run, local.dry_run, frozenset())
sys.exit(main(on_failure=on_failure))
"""

WAITS = "import signal; signal.pause()"

HASTE = {"window": 0.3, "linger": 0.1, "patience": 0.3}
FOREVER = 600.0  # seconds; a limit that no test waits for

# Servers are ended with the last worker, whether or not they have come to say anything: who wants to hear them
# lets the workers wait for this.
SPOKEN = "import os; open('spoken-' + os.environ['DMLC_ROLE'] + os.environ['DMLC_TASK_ID'], 'w').close()"


def when_spoken(*names: str, folder: str = "") -> str:
    """Python that waits until these processes, such as `server0`, have said SPOKEN in that working directory."""
    paths = [os.path.join(folder, f"spoken-{name}") for name in names]  # noqa: PTH118
    return f"import os, time\nwhile not all(map(os.path.exists, {paths})): time.sleep(0.01)\n"


@dataclass
class Launched:
    """A running launch.py: its output, and every process that descends from it."""

    process: subprocess.Popen[bytes]
    directory: Path
    token: str

    @property
    def out(self) -> str:
        return (self.directory / "out").read_bytes().decode(errors="replace")

    @property
    def all_err(self) -> str:
        return (self.directory / "err").read_bytes().decode(errors="replace")

    @property
    def err(self) -> str:
        """Without the line that says what starts."""
        return "".join(line for line in self.all_err.splitlines(True) if not line.startswith("launch.py: starting "))

    @property
    def lines(self) -> list[str]:
        return sorted(self.out.splitlines())

    def wait(self, timeout: float = LONG) -> int:
        return self.process.wait(timeout)

    def over(self) -> str | None:
        """What it has said if it has ended; for `until`."""
        return None if self.process.poll() is None else f"it has ended: {self.err}"

    def kill(self, signum: int) -> None:
        os.kill(self.process.pid, signum)

    def processes(self) -> Iterator[Path]:
        """The folders in /proc of everything alive that was started with our token."""
        token = f"TEST_TOKEN={self.token}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if token in (entry / "environ").read_bytes().split(b"\0"):
                        yield entry

    def family(self) -> dict[int, str]:
        """The same: pid -> command line."""
        found = {}
        for entry in self.processes():
            with contextlib.suppress(OSError):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def pid_of(self, *words: str) -> int:
        (pid,) = (pid for pid, line in self.family().items() if all(word in line for word in words))
        return pid

    def end(self) -> None:
        """Kill it, and whatever is left of it."""
        self.process.kill()
        self.process.wait()
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def launch(
    argv: Sequence[str],
    env: Mapping[str, str],
    token: str,
    cwd: Path,
    outputs: Path,
    *,
    stdin: IO[bytes] | int = subprocess.DEVNULL,
    stdout: int | None = None,
    stderr: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start something in a session of its own, marked with a token; what it says goes to files in `outputs`."""
    outputs.mkdir(exist_ok=True)
    with (outputs / "out").open("wb") as out, (outputs / "err").open("wb") as err:
        return subprocess.Popen(
            argv,
            cwd=cwd,
            env={**env, "PYTHONPATH": env.get("PYTHONPATH", str(ROOT)), "TEST_TOKEN": token},
            stdin=stdin,
            stdout=out if stdout is None else stdout,
            stderr=err if stderr is None else stderr,
            start_new_session=True,
        )
