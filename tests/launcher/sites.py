"""Places to launch on: one kind of launcher each, over real hosts, and what it takes to start it there."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cluster.hosts import Hosts
from cluster.mpi import mpi
from launched import ROOT, WAITS, Launched, launch
from proc import started, state
from waiting import until

KINDS = ("ssh", "openmpi", "mpich", "slurm", "sge")
MANAGED = KINDS[1:]
LIMIT = {"KVSTORE_HEARTBEAT_TIMEOUT_S": "3"}

# launch.py with stand-ins for the servers, which need no torch: most tests are not about them.
DRIVER = """
import dataclasses, os, sys
import launcher.launch as entry
from launcher.kinds.registry import find as real

exec(os.environ.get("PRELUDE", ""))

def find(name, job):
    kind = real(name, job)
    argv = (sys.executable, "-S", "-c", os.environ["FAKE_SERVER"])
    def run(job, on_failure):
        return kind.run(dataclasses.replace(job, server_argv=argv), on_failure)
    return dataclasses.replace(kind, run=run)

entry.find = find
sys.exit(entry.main(on_failure=lambda task, how: None))
"""


class Running(Launched):
    """A launch.py that has been started on a site."""

    @property
    def pid(self) -> int:
        """Of launch.py itself, which may be on a host, where a signal to what has entered it does not go."""
        return self.called("launch")[0]

    def called(self, word: str) -> list[int]:
        """The processes with our environment whose program, or first arguments, have this in them; the oldest first."""
        found = []
        for entry in self.processes():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if word.encode() in b"".join(words[:3]) and words[0].rpartition(b"/")[2] not in (b"nsenter", b"env"):
                    found.append((started(entry.name), int(entry.name)))
        return [pid for _, pid in sorted(found)]

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
        enter: makes a command one that runs where jobs are submitted, in a directory.
        run: runs one of the manager's own commands.
    """

    kind: str
    words: tuple[str, ...]
    env: Mapping[str, str]
    hosts: Hosts
    directory: Path
    enter: Callable[[list[str], Path], list[str]] = lambda argv, cwd: argv
    run: Callable[..., subprocess.CompletedProcess[str]] | None = None
    started: list[Running] = field(default_factory=list)
    mark: str = field(default_factory=lambda: f"mark{uuid.uuid4().hex}")

    def launch(
        self,
        *argv: str | bytes,
        real: bool = False,
        server: str = WAITS,
        env: Mapping[str, str] | Mapping[bytes, bytes] | None = None,
        cwd: Path | None = None,
        stdout: int | None = None,
    ) -> Running:
        """Start launch.py with these words behind the site's own."""
        here, token = self.directory / f"launch-{len(self.started)}", uuid.uuid4().hex
        program = [sys.executable, "-m", "launcher"] if real else [sys.executable, "-c", DRIVER]
        environ = {name: value for name, value in self.env.items() if not name.startswith(("DMLC_", "KVSTORE_"))}
        given = {os.fsdecode(name): os.fsdecode(value) for name, value in (env or {}).items()}
        environ |= {"PYTHONPATH": str(ROOT), "FAKE_SERVER": server, **given}
        where = cwd or self.directory
        command = self.enter([os.fsdecode(word) for word in (*program, *self.words, *argv)], where)
        process = launch(command, environ, token, where, here, stdout=stdout)
        self.started.append(Running(process, here, token))
        return self.started[-1]

    def sleepers(self, env: Mapping[str, str] | None = None, *argv: str) -> Running:
        """Start three workers that never end, and a server, and wait until they run."""
        code = f"import time; print('here', flush=True); time.sleep(999)  # {self.mark}"
        run = self.launch("-n", "3", "-s", "1", *argv, "python", "-c", code, env={**LIMIT, **(env or {})})
        until(lambda: run.out.count("here") == 3, "the workers to run", over=run.over)
        return run

    def processes(self, word: str, host: int | None = None) -> dict[int, str]:
        """What runs on a host, or on all, and has this word in its command line."""
        hosts = range(len(self.hosts)) if host is None else (host,)
        found = [item for i in hosts for item in self.hosts.processes(i).items()]
        return {pid: line for pid, line in found if word in line}

    def worker(self, rank: int) -> tuple[int, int]:
        """The process of a worker, and the number of its host."""
        return self.member("worker", rank, self.mark)

    def member(self, role: str, rank: int, word: str) -> tuple[int, int]:
        """The process of a member with this word in its command line, and the number of its host."""
        wanted = {f"DMLC_ROLE={role}".encode(), b"DMLC_TASK_ID=%d" % rank}
        for i in range(len(self.hosts)):
            for pid in self.processes(word, i):
                try:
                    if wanted <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                        return pid, i
                except OSError:
                    continue
        raise AssertionError(f"no {role} {rank}")

    def left(self, word: str) -> list[str]:
        """The command lines on any host, or here, that have this word in them."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    ended = state(entry.name) == "Z"
                except OSError:
                    continue
                if word in line and not ended:
                    found.append(line)
        return found

    def relics(self) -> list[str]:
        """What jobs have left on the hosts and in the directory: processes, shared memory, files."""
        found = list((self.processes(self.mark) | self.processes("launcher")).values())
        for i, host in enumerate(self.hosts.names):
            found += [f"{host}: /dev/shm/{name}" for name in self.hosts.shared_memory(i)]
            pid = next(iter(self.hosts.processes(i)), None) if self.kind in ("slurm", "sge") else None
            if pid is not None:
                found += [f"{host}: {path}" for path in Path(f"/proc/{pid}/root/tmp").glob("kvstore-*")]
        found += [str(path) for path in self.directory.glob(".kvstore*")]
        return [*found, *(str(path) for path in Path(self.env.get("TMPDIR", "/nowhere")).glob("kvstore-*"))]

    def close(self) -> None:
        """Kill every launch.py."""
        for running in self.started:
            running.process.kill()
            running.process.wait()


@contextlib.contextmanager
def place(kind: str, request: pytest.FixtureRequest, directory: Path) -> Iterator[Site]:
    """A place of that kind, whose jobs run in this directory."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        if kind in ("slurm", "sge"):
            there = request.getfixturevalue(kind)
            spread = ("--cluster-option=--nodes=2", "--cluster-option=--ntasks-per-node=2")
            words: tuple[str, ...] = ("--launcher", kind, *(spread if kind == "slurm" else ()))
            made = Site(kind, words, there.env, there.hosts, directory, run=there.run)
            if kind == "sge":
                made.enter = there.enter
        else:
            hosts = request.getfixturevalue("hosts")
            words = ("--launcher", "ssh" if kind == "ssh" else "mpi", "-H", str(hosts.hostfile()))
            env = hosts.launcher_env if kind == "ssh" else mpi(kind, hosts).env
            made = Site(kind, words, {**env, "TMPDIR": short}, hosts, directory)
        try:
            yield made
        finally:
            for i in range(len(made.hosts)):
                made.hosts.mend(i)
            made.close()
