"""Places to launch on: one kind of launcher each, over real hosts, and what it takes to start it there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cluster.hosts import Hosts

ROOT = Path(__file__).resolve().parents[2]

# launch.py with stand-ins for the servers, which need no torch: most tests are not about them.
DRIVER = """
import dataclasses, os, sys
import launcher.launch as entry
from launcher.kinds import find as real

def find(name, job):
    kind = real(name, job)
    argv = (sys.executable, "-S", "-c", os.environ["FAKE_SERVER"])
    def run(job, on_failure):
        return kind.run(dataclasses.replace(job, server_argv=argv), on_failure)
    return dataclasses.replace(kind, run=run)

entry.find = find
sys.exit(entry.main(on_failure=lambda task, how: None))
"""

WAITS = "import signal; signal.pause()"


@dataclass
class Running:
    """A launch.py that has been started."""

    process: subprocess.Popen[bytes]
    directory: Path
    token: str

    @property
    def out(self) -> str:
        return (self.directory / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.directory / "err").read_text(errors="replace")

    @property
    def lines(self) -> list[str]:
        return sorted(self.out.splitlines())

    def wait(self, timeout: float = 40.0) -> int:
        return self.process.wait(timeout)

    @property
    def pid(self) -> int:
        """Of launch.py itself, which may be on a host, where a signal to what has entered it does not go."""
        token = f"TEST_TOKEN={self.token}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    if token in (entry / "environ").read_bytes().split(b"\0") and b"launch" in b"".join(words[1:3]):
                        started = int((entry / "stat").read_text().rpartition(")")[2].split()[19])
                        found.append((started, int(entry.name)))
                except OSError:
                    continue
        return min(found)[1]

    def send(self, signum: int) -> None:
        os.kill(self.pid, signum)


@dataclass
class Site:
    """A kind of launcher over hosts.

    Attributes:
        kind: `ssh`, `openmpi`, `mpich`, `slurm`, `sge`.
        words: launch.py's options for it.
        env: the environment to start it in.
        hosts: where the processes go.
        directory: which all hosts see, and where jobs run.
        enter: makes a command one that runs where jobs are submitted.
    """

    kind: str
    words: tuple[str, ...]
    env: Mapping[str, str]
    hosts: Hosts
    directory: Path
    enter: Callable[[list[str]], list[str]] = list
    started: list[Running] = field(default_factory=list)

    def launch(
        self, *argv: str, real: bool = False, server: str = WAITS, env: Mapping[str, str] | None = None
    ) -> Running:
        """Start launch.py with these words behind the site's own."""
        here = self.directory / f"launch-{len(self.started)}"
        here.mkdir()
        program = [sys.executable, "-m", "launcher"] if real else [sys.executable, "-c", DRIVER]
        environ = {name: value for name, value in self.env.items() if not name.startswith(("DMLC_", "KVSTORE_"))}
        token = uuid.uuid4().hex
        with (here / "out").open("wb") as out, (here / "err").open("wb") as err:
            process = subprocess.Popen(
                self.enter([*program, *self.words, *argv]),
                cwd=self.directory,
                env={**environ, "PYTHONPATH": str(ROOT), "FAKE_SERVER": server, "TEST_TOKEN": token, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.started.append(Running(process, here, token))
        return self.started[-1]

    def left(self, word: str) -> list[str]:
        """The command lines on any host, or here, that have this word in them."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                except OSError:
                    continue
                if word in line and state != "Z":
                    found.append(line)
        return found

    def close(self) -> None:
        """Kill every launch.py."""
        for running in self.started:
            running.process.kill()
            running.process.wait()


def until(condition: Callable[[], object], what: str, timeout: float = 20.0, run: Running | None = None) -> None:
    """Wait for something to hold; as long as a launch.py runs, if it takes that."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert run is None or run.process.poll() is None, f"it ended before {what}: {run.err}"
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)
