"""A job that ``launch.py`` has started, as ``killing.py`` wants it: real processes, really started again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from faults.killing import Kills, Result, drive

ROOT = Path(__file__).parents[2]
END_S = 20.0
SIZE = ("-n", "2", "-s", "2", "--replicas", "1", "--restarts", "4096")
LINKS = {
    "unix": {"KVSTORE_SHM": "0"},
    "shm": {},
    "tcp": {"KVSTORE_TRANSPORT": "tcp", "KVSTORE_SHM": "0"},
    "zeromq": {"KVSTORE_TRANSPORT": "zeromq"},
}


class Launched:
    """One job on this machine, with more environment and options of ``launch.py`` if need be."""

    def __init__(
        self,
        directory: Path,
        command: str,
        env: Mapping[str, str],
        options: tuple[str, ...] = (),
        size: tuple[str, ...] = SIZE,
    ) -> None:
        self.directory = directory
        self._said = directory / "output"
        self._mark = f"{directory}"
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        own = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "KVSTORE_"))}
        with self._said.open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "launcher", *size, *options, command],
                env=own | {"PYTHONPATH": paths, "FAULTS_RUN": self._mark, "OMP_NUM_THREADS": "1"} | dict(env),
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self._said.read_text(errors="replace")

    def pid(self, name: str) -> int | None:
        role, _, rank = name.partition(" ")
        wanted = {b"DMLC_ROLE=" + role.encode(), b"FAULTS_RUN=" + self._mark.encode()}
        if role != "scheduler":
            wanted.add(b"DMLC_TASK_ID=" + rank.encode())
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (entry / "environ").read_bytes().split(b"\0")
                if wanted.issubset(variables) and b"servers" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        return max(found, default=None)

    def send(self, name: str, number: int) -> None:
        pid = self.pid(name)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def move(self, name: str) -> None:
        words = ["launcher.job_command", "move-server", name.replace(" ", ":"), f"--job={self.process.pid}"]
        path = {"PYTHONPATH": f"{ROOT}"}
        told = subprocess.run(
            [sys.executable, "-m", *words], env=os.environ | path, capture_output=True, text=True, timeout=60.0
        )
        if told.returncode:
            raise AssertionError(f"{name} could not be moved: {told.stderr}\n{self.output}")

    def reap(self) -> None:
        """No effect: ``launch.py`` does that."""

    def wait(self, seconds: float) -> list[str]:
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return ["launch.py"]
        return [f"launch.py (exit code {code})"] if code else []

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextlib.contextmanager
def launched(
    command: str, env: Mapping[str, str], options: tuple[str, ...] = (), size: tuple[str, ...] = SIZE
) -> Iterator[Launched]:
    """A job in a directory of its own, which the command may name as ``$FAULTS_RUN``; nothing of it stays."""
    directory = Path(tempfile.mkdtemp(prefix="killing-"))
    try:
        job = Launched(directory, command, env, options, size)
        try:
            yield job
        finally:
            job.end()
    finally:
        shutil.rmtree(directory)


def carry_out(kills: Kills, pause_s: float = 0.0) -> Result:
    command = f'{sys.executable} -m faults.counting "$FAULTS_RUN" {kills.mode} {pause_s}'
    with launched(command, LINKS[kills.kind]) as job:
        return drive(job, kills)
