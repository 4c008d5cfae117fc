"""Contenders whose processes start over ssh on hosts, as users start them: by ``launch.py``, and by ``mpirun``."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.contenders import Samples, Work
from benchmarks.hosts import INTERFACE
from benchmarks.jobs import Member, Place, Unavailable, run, scratch
from benchmarks.peers import Peers
from benchmarks.ssh import Ssh

# The hosts share the cores of this machine: a rank that waits must let others go on, and none may be bound to a core.
OPEN_MPI = (
    *("--bind-to", "none"),
    *("--mca", "mpi_yield_when_idle", "1"),
    *("--mca", "oob_tcp_if_include", INTERFACE),
    *("--mca", "btl_tcp_if_include", INTERFACE),
)


@dataclass(frozen=True)
class Setting:
    """How a job of ours differs from what a user gets; by default in nothing.

    Attributes:
        label: of its row, after our name.
        env: variables of all processes.
        options: of ``launch.py``.
        words: of the program that does the rounds.
    """

    label: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()
    words: Sequence[str] = ()


DEFAULT = Setting()
# What `--also` names.
SETTINGS: Mapping[str, Setting] = {
    "flat": Setting("no host aggregation", {"KVSTORE_AGGREGATE": "0"}),
    "plain": Setting("no keys", options=["--no-encryption"]),
    "one-thread": Setting("OMP_NUM_THREADS=1", {"OMP_NUM_THREADS": "1"}),
    "plain-one-thread": Setting("no keys, OMP_NUM_THREADS=1", {"OMP_NUM_THREADS": "1"}, ["--no-encryption"]),
    "replicas": Setting("a standby for each server", options=["--replicas", "1"]),
    "plain-replicas": Setting("no keys, a standby for each server", options=["--no-encryption", "--replicas", "1"]),
    "2bit": Setting("2bit, fp16 back", words=["--compression", '{"type": "2bit", "threshold": 1.0, "pull": "fp16"}']),
}


@dataclass(frozen=True)
class Launched:
    """This project, started on hosts by ``launch.py --launcher ssh`` from the first of them.

    Attributes:
        work: the rounds.
        ssh: what logs in at the hosts.
        setting: how it differs from the defaults.
        apart: those of the hosts that are for servers alone. Workers are spread evenly over the others, and so are
            servers if there are none of these.
        sent: for each run the bytes that the first host has sent in a round.
    """

    work: Work
    ssh: Ssh
    setting: Setting = DEFAULT
    apart: Sequence[Place] = ()
    sent: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """See ``Contender``."""
        return ", ".join(filter(None, ["kvstore", self.setting.label]))

    def run(self) -> Samples:
        """See ``Contender``."""
        with scratch() as folder:
            path = folder / "report"
            program = [sys.executable, "-m", "benchmarks.programs.rounds", *self.work.words, *self.setting.words]
            command = self.command([*program, "--report", str(path)])
            figures = run([Member("launch.py", command, self.setting.env, self.ssh.places[0])], path)
        return _samples(self.name, figures, self.sent)

    def command(self, program: Sequence[str]) -> list[str]:
        """Return the command line that starts ``program`` in all workers."""
        counts = ["-n", str(self.work.workers), "-s", str(self.work.servers)]
        others = [place for place in self.ssh.places if place not in self.apart]
        there = ["--launcher", "ssh", "--ssh-config", str(self.ssh.config)]
        there += ["-H", str(self.ssh.hostfile(others, self.work.workers))]
        if self.apart:
            there += ["--server-hosts", str(self.ssh.hostfile(self.apart, self.work.servers))]
        passed = [word for name in self.setting.env for word in ("--env", name)]
        return [sys.executable, "-m", "launcher", *counts, *there, *passed, *self.setting.options, shlex.join(program)]


@dataclass(frozen=True)
class OpenMpi:
    """Open MPI's all-reduce of one flat array, by mpi4py. It only sums; there are no servers that update.

    Attributes:
        work: the rounds; ranks are spread evenly over the hosts.
        peers: who has the Python with mpi4py.
        ssh: what logs in at the hosts.
        sent: for each run the bytes that the first host has sent in a round.
    """

    work: Work
    peers: Peers
    ssh: Ssh
    name: str = "openmpi"
    sent: list[float] = field(default_factory=list)

    def run(self) -> Samples:
        """See ``Contender``."""
        mpirun, python = open_mpi(), self.peers.openmpi()
        with scratch() as folder:
            path = folder / "report"
            program = [python, "-m", "benchmarks.programs.mpi", *self.work.size, "--report", str(path)]
            env = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            figures = run([Member("mpirun", self.command(mpirun, program), env, self.ssh.places[0])], path)
        return _samples(self.name, figures, self.sent)

    def command(self, mpirun: str, program: Sequence[str]) -> list[str]:
        """Return the command line that starts ``program`` in all ranks."""
        hostfile = self.ssh.hostfile(self.ssh.places, self.work.workers)
        there = ["--hostfile", str(hostfile), "--mca", "plm_rsh_agent", f"ssh -F {self.ssh.config}"]
        return [mpirun, "-np", str(self.work.workers), *there, *OPEN_MPI, *program]


def open_mpi() -> str:
    """Return the path of Open MPI's ``mpirun``.

    Raises:
        Unavailable: there is none.
    """
    for name in ("mpirun.openmpi", "mpirun"):
        path = shutil.which(name)
        if path is None:
            continue
        if "Open MPI" in subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout:
            return path
    raise Unavailable("there is no Open MPI; on Debian and Ubuntu: apt-get install openmpi-bin")


def _samples(name: str, figures: Mapping[str, Any], sent: list[float]) -> Samples:
    sent.append(figures["sent"])
    return {name: figures["times"]}
