"""A real Grid Engine over hosts: the first is where jobs are submitted, and the master runs there too; all execute.

It has a root and a cell of its own; no configuration of the machine's is read or written.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.hosts import Hosts
from cluster.missing import find
from cluster.namespaces import Failed, environment
from waiting import LONG, until

PROGRAMS = ("sge_qmaster", "sge_execd", "qsub", "qconf", "qstat", "qdel")
INSTALLED = Path("/var/lib/gridengine")
SHARE = Path("/usr/share/gridengine")
LIB = Path("/usr/lib/gridengine")
SLOTS = 8
QUEUE = {"qname": "all.q", "slots": f"{SLOTS}", "pe_list": "kvstore", "load_thresholds": "NONE", "shell": "/bin/sh"}
# Jobs start and end at once, rather than at the next quarter of a minute.
HASTE = {"schedule_interval": "0:0:1", "flush_submit_sec": "1", "flush_finish_sec": "1"}
PARALLEL = {
    "pe_name": "kvstore",
    "slots": "999",
    "user_lists": "NONE",
    "xuser_lists": "NONE",
    "start_proc_args": "NONE",
    "stop_proc_args": "NONE",
    "allocation_rule": "$round_robin",
    "control_slaves": "TRUE",
    "job_is_first_task": "FALSE",
    "urgency_slots": "min",
    "accounting_summary": "FALSE",
    "qsort_args": "NONE",
}


@dataclass(frozen=True)
class Sge:
    """A running Grid Engine.

    Attributes:
        env: a whole environment for its commands, which work on a host only: ``enter`` goes there.
        hosts: where it runs.
    """

    env: dict[str, str]
    hosts: Hosts

    def enter(self, argv: Sequence[str], cwd: Path | str | None = None) -> list[str]:
        """The command line that runs ``argv`` where jobs are submitted; it is to have ``env``."""
        return self.hosts.enter(0, argv, cwd)

    def run(
        self, *argv: str, cwd: Path | None = None, text: str | None = None, timeout: float = LONG
    ) -> subprocess.CompletedProcess[str]:
        """Run ``qsub`` or any other command, where jobs are submitted, to its end."""
        return self.hosts.run(0, argv, cwd=cwd, env=self.env, text=text, timeout=timeout)

    def jobs(self) -> list[str]:
        """The numbers of the jobs that have not ended; one of many tasks is there once or more often."""
        return [line.split()[0] for line in self.run("qstat", "-u", "*").stdout.splitlines()[2:]]

    def clear(self) -> None:
        """Cancel all jobs, and wait until they have ended."""
        if jobs := sorted(set(self.jobs())):
            self.run("qdel", *jobs)
            until(lambda: not self.jobs(), "all jobs of Grid Engine to end", step=0.1)


@contextlib.contextmanager
def sge(hosts: Hosts) -> Iterator[Sge]:
    """Grid Engine on these hosts, until the end.

    Raises:
        Failed: it does not come up; the message is what its parts have said.
    """
    root = hosts.directory / "sge"
    env = environment() | {"SGE_ROOT": f"{root}", "SGE_CELL": "default", "SGE_ND": "1"}
    running = Sge(env, hosts)
    _files(running, root)
    started: list[subprocess.Popen[bytes]] = []

    def start(i: int, name: str) -> None:
        with (root / f"{name}-{i}.out").open("wb") as out:
            argv = ["setpriv", "--pdeathsig", "KILL", *hosts.enter(i, [find(name) or name])]
            started.append(
                subprocess.Popen(
                    argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
                )
            )

    try:
        start(0, "sge_qmaster")
        until(lambda: running.run("qconf", "-sh").returncode == 0, "sge_qmaster", step=0.1)
        _check(running, "qconf", "-ah", ",".join(hosts.names))
        _check(running, "qconf", "-as", ",".join(hosts.names))
        for i in range(len(hosts)):
            start(i, "sge_execd")
        until(
            lambda: set(running.run("qconf", "-sel").stdout.split()) == set(hosts.names), "all of sge_execd", step=0.1
        )
        for option, show, settings in (
            ("-Ap", (), PARALLEL),
            ("-Aq", ("-sq",), QUEUE | {"hostlist": " ".join(hosts.names)}),
            ("-Msconf", ("-ssconf",), HASTE),
        ):
            path = root / f"settings{option}"
            path.write_text(_changed(running.run("qconf", *show).stdout if show else "", settings))
            _check(running, "qconf", option, f"{path}")
        until(lambda: _ready(running), "the queue to have its slots", step=0.1)
        yield running
    except (Failed, AssertionError) as error:
        logs = [*root.glob("*.out"), *root.glob("qmaster/messages"), *root.glob("execd/*/messages")]
        said = [f"{path}: {path.read_text(errors='replace')[-1500:]}" for path in logs]
        raise Failed("\n".join([str(error), *said])) from None
    finally:
        hosts.clear()
        for process in started:
            process.kill()
            process.wait()


def _ready(running: Sge) -> bool:
    """Whether every host offers its slots, and none is in a bad state (a sixth column)."""
    lines = [line.split() for line in running.run("qstat", "-f").stdout.splitlines() if line.startswith("all.q@")]
    return len(lines) == len(running.hosts) and all(len(line) == 5 and line[3] != "-NA-" for line in lines)


def _files(running: Sge, root: Path) -> None:
    """What Debian's packages and the installer would set up."""
    common = root / "default/common"
    for path in (common, root / "spool", root / "qmaster/job_scripts", root / "execd"):
        path.mkdir(parents=True)
    for name in ("bin", "lib", "util", "utilbin"):
        (root / name).symlink_to(INSTALLED / name)
    (common / "act_qmaster").write_text(f"{running.hosts.names[0]}\n")
    (common / "bootstrap").write_text(f"""\
admin_user              none
default_domain          none
ignore_fqdn             false
spooling_method         berkeleydb
spooling_lib            libspoolb
spooling_params         {root}/spool
binary_path             /usr/sbin
qmaster_spool_dir       {root}/qmaster
security_mode           none
listener_threads        2
worker_threads          2
scheduler_threads       1
""")
    settings = {"execd_spool_dir": f"{root}/execd", "mailer": "/bin/true", "min_uid": "0", "min_gid": "0"}
    settings["load_report_time"] = "00:00:01"
    (root / "configuration").write_text(_changed((SHARE / "default-configuration").read_text(), settings))
    _check(running, f"{LIB}/spoolinit", "berkeleydb", "libspoolb", f"{root}/spool", "init")
    for what, source in (
        ("configuration", root / "configuration"),
        ("complexes", SHARE / "util/resources/centry"),
        ("usersets", SHARE / "util/resources/usersets"),
        ("managers", "root"),
    ):
        _check(running, f"{LIB}/spooldefaults", what, f"{source}")


def _changed(text: str, settings: dict[str, str]) -> str:
    """A configuration, in lines of a name and a value, with other values."""
    kept = [line for line in text.splitlines() if line.split(None, 1)[:1] and line.split(None, 1)[0] not in settings]
    return "\n".join([*kept, *(f"{name} {value}" for name, value in settings.items())]) + "\n"


def _check(running: Sge, *argv: str) -> None:
    done = running.run(*argv)
    if done.returncode:
        raise Failed(f"`{' '.join(argv)}` ended with {done.returncode}: {done.stderr}{done.stdout}")
