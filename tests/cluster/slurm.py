"""A real Slurm over hosts: its controller runs where the tests do, and each host is a node. No configuration of the
machine's is read or written.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.hosts import Hosts
from cluster.missing import find
from cluster.namespaces import Failed, environment
from waiting import LONG, until

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "salloc", "sbatch", "scancel", "squeue", "sinfo", "scontrol")
CPUS = 8


@dataclass(frozen=True)
class Slurm:
    """A running Slurm.

    Attributes:
        env: a whole environment, in which ``srun``, ``sbatch`` and so on are of this one.
        hosts: its nodes, which have no name outside; ``hosts.names`` are the names of the nodes.
    """

    env: dict[str, str]
    hosts: Hosts

    def run(
        self, *argv: str, cwd: Path | None = None, text: str | None = None, timeout: float = LONG
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm's, or any other, to its end."""
        return subprocess.run(
            argv, env=self.env, cwd=cwd, input=text, capture_output=True, text=True, check=False, timeout=timeout
        )

    def jobs(self) -> list[str]:
        """The numbers of the jobs that have not ended."""
        return self.run("squeue", "--noheader", "--format=%i").stdout.split()

    def clear(self) -> None:
        """Cancel all jobs, and wait until they have ended."""
        if self.jobs():
            self.run("scancel", "--signal=KILL", "--full", *self.jobs())
            self.run("scancel", *self.jobs())
            until(lambda: not self.jobs(), "all jobs of Slurm to end", step=0.1)


@contextlib.contextmanager
def slurm(hosts: Hosts) -> Iterator[Slurm]:
    """Slurm, with these hosts as its nodes, until the end.

    Raises:
        Failed: it does not come up; the message is what its parts have said.
    """
    directory = hosts.directory / "slurm"
    for part in ("", "state", "munge", *(f"spool-{name}" for name in hosts.names)):
        (directory / part).mkdir(mode=0o755)
    (directory / "slurm.conf").write_text(_configuration(hosts, directory))
    (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    env = environment() | {"SLURM_CONF": f"{directory / 'slurm.conf'}"}
    for name in [name for name in env if name.startswith(("SLURM_", "SBATCH_")) and name != "SLURM_CONF"]:
        del env[name]
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, argv: Sequence[str]) -> None:
        with (directory / f"{name}.out").open("wb") as out:
            dying = ["setpriv", "--pdeathsig", "KILL", *argv]
            started.append(
                subprocess.Popen(
                    dying, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
                )
            )

    running = Slurm(env, hosts)
    try:
        start("munged", _munged(directory))
        until((directory / "munge/socket").exists, "munged")
        start("slurmctld", [find("slurmctld") or "", "-D", "-c"])
        for i, name in enumerate(hosts.names):
            start(f"slurmd-{name}", hosts.enter(i, [find("slurmd") or "", "-D", "-N", name]))
        until(lambda: _idle(running), "all nodes of Slurm to be idle", step=0.1)
        yield running
    except (Failed, AssertionError) as error:
        logs = [f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in sorted(directory.glob("*.out"))]
        raise Failed("\n".join([str(error), *logs])) from None
    finally:
        hosts.clear()  # ends the daemons of the nodes, with their jobs
        for process in reversed(started):
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _idle(running: Slurm) -> bool:
    states = running.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()
    return states == ["idle"] * len(running.hosts)


def _munged(directory: Path) -> list[str]:
    """The command line of munged, with a new key, and all its files in our directory."""
    munge = directory / "munge"
    key = munge / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    files = [f"--{option}={munge / option.split('-')[0]}" for option in ("socket", "pid-file", "log-file", "seed-file")]
    return [find("munged") or "", "--foreground", "--force", f"--key-file={key}", *files]


def _configuration(hosts: Hosts, directory: Path) -> str:
    nodes = "".join(
        f"NodeName={name} NodeAddr={address} Port={_port(1)} CPUs={CPUS} RealMemory=1000 State=UNKNOWN\n"
        for name, address in zip(hosts.names, hosts.addresses, strict=True)
    )
    return f"""\
ClusterName=kvstore
SlurmctldHost={os.uname().nodename}({hosts.outside})
SlurmctldPort={_port(0)}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge/socket
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/spool-%n/pid
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
SlurmctldTimeout=10
SlurmdTimeout=300
InactiveLimit=0
KillWait=2
MinJobAge=10
{nodes}PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def _port(number: int) -> int:
    """A port that another run's controller does not have: it listens on all addresses of the machine."""
    return 20000 + 2 * (os.getpid() % 5000) + number
