"""Processes in namespaces of their own. They die with the test run, however it ends, and all they hold goes with them.

No namespace has a name, so nothing can stay behind: the kernel removes one, with its links and mounts and processes,
when the process that holds it dies; and that one is killed when the run is, even by SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.missing import PLACES, find
from waiting import LONG


class Failed(RuntimeError):
    """A command of the test bed did not work; the message is what it said."""


def call(*words: str, text: str | None = None) -> str:
    """Run a command of the machine's and return what it printed; ``text`` is its input."""
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False, env=environment())
    if done.returncode:
        raise Failed(f"`{' '.join(words)}` ended with {done.returncode}: {done.stderr.strip()}{done.stdout.strip()}")
    return done.stdout


def environment() -> dict[str, str]:
    """Ours, with a PATH that has the programs of the superuser too, and without what would be settings of a job."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "KVSTORE_"))}
    return ours | {"PATH": PLACES}


class Namespace:
    """A shell script with namespaces of its own, up to its line ``ready``, where it waits for ``go()``.

    Args:
        script: for ``sh``. It must ``echo ready`` once it has set itself up, and may then ``read`` a line.
        arguments: its ``$1`` and so on.
        own: which namespaces it gets, as options of ``unshare``. With ``--pid`` the script is their process 1.
        log: where its errors go.
    """

    def __init__(self, script: str, arguments: Sequence[str], own: Sequence[str], log: Path) -> None:
        self._own = own
        isolated = [*own, "--fork", "--kill-child", "--mount-proc"] if "--pid" in own else own
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "unshare", *isolated, "sh", "-ec", script, "sh", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(),
                start_new_session=True,  # Ctrl-C is for the tests, which then end this in order
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.pid = self._process.pid
        if self._stdout.readline() != b"ready\n":
            self.end()
            raise Failed(f"a namespace could not be set up: {log.read_text().strip()}")
        if "--pid" in own:
            (self.pid,) = self.children()

    def go(self) -> None:
        """Let the script go on from where it reads a line."""
        self._stdin.write(b"go\n")
        self._stdin.flush()

    def enter(self, argv: Sequence[str], cwd: Path | str | None = None) -> list[str]:
        """The command line that runs ``argv`` inside."""
        there = ["env", "-C", f"{cwd}"] if cwd is not None else []
        return [find("nsenter") or "nsenter", "--target", f"{self.pid}", *self._own, *there, *argv]

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        text: str | None = None,
        timeout: float = LONG,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``argv`` inside to its end; it has started nothing that outlives it, unless it says so itself."""
        return subprocess.run(
            self.enter(argv, cwd),
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            env=None if env is None else dict(env),
        )

    def children(self) -> list[int]:
        """The children of process 1."""
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def processes(self) -> dict[int, str]:
        """All that is alive inside but process 1, by the number that it has out here: its command line."""
        mine = Path(f"/proc/{self.pid}/ns/pid").readlink().name
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.pid:
                continue
            with contextlib.suppress(OSError):
                if (entry / "ns/pid").readlink().name != mine:
                    continue
                if (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(entry.name)] = line.strip()
        return found

    @property
    def alive(self) -> bool:
        """Whether it is still there."""
        return self._process.poll() is None

    def end(self) -> None:
        """Kill all that is inside. Nothing is left on return."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.kill(self.pid, signal.SIGKILL)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._stdout.close()


@contextlib.contextmanager
def child(argv: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that is killed at the end, should it still run. The options are those of ``Popen``."""
    with subprocess.Popen(argv, **options) as process:
        try:
            yield process
        finally:
            process.kill()
