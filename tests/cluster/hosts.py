"""Several hosts on one machine, as far as programs can tell: each has its sshd, its name, its addresses, its process
numbers, its shared memory, its /tmp and its /root. They share all other files, as a cluster shares its file system.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from cluster.namespaces import Namespace
from cluster.network import NOBODY, OUTSIDE, REFUSING, SILENT, Network
from cluster.ssh import Login, Ssh
from waiting import LONG, until

ROOT = Path(__file__).resolve().parents[2]
STATE = Path("/run/kvstore-tests")
PROGRAMS = ("ip", "tc", "setpriv", "unshare", "nsenter", "mount", "ssh", "ssh-keygen", "sshd")
OWN = ["--net", "--uts", "--ipc", "--mount", "--pid"]

# What of the file system each host has for itself.
PRIVATE = (Path("/tmp"), Path("/root"))

# Process 1 of a host. $1: its name, $2: our files, $3: a directory to make its own directories in, $4: those, and what
# of them all hosts share; then its sshd.
INIT = """
mount -t sysfs sysfs /sys
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/shadow" /etc/shadow   # root may be locked on this machine
mount -t tmpfs tmpfs "$3"
while read -r kind path; do
  mkdir -p "$3$path"
  [ "$kind" = private ] || mount --bind "$path" "$3$path"
done <"$4"
chmod 1777 "$3/tmp"
while read -r kind path; do
  [ "$kind" = shared ] || mount --rbind "$3$path" "$path"
done <"$4"
hostname "$1"
shift 4
echo ready
read -r _
exec </dev/null >/dev/null
"$@" &
wait   # until sshd ends; meanwhile this buries the dead
"""

_numbers = itertools.count()


class Hosts:
    """Hosts by number, from 0. Make them by ``Hosts.up``.

    Besides them, the network has ``refusing``, where nobody listens; ``silent``, where all is lost without a word; and
    ``nobody``, which after some seconds is told to be unreachable.
    """

    def __init__(self, directory: Path, network: Network, names: Sequence[str], ports: Sequence[int]) -> None:
        numbers = range(1, len(names) + 1)
        self.directory = directory
        self.names = tuple(names)
        self.ports = tuple(ports)
        self.addresses = tuple(network.v4(number) for number in numbers)
        self.addresses6 = tuple(network.v6(number) for number in numbers)
        self.refusing, self.silent, self.nobody = (network.v4(one) for one in (REFUSING, SILENT, NOBODY))
        self.outside, self.outside6 = network.v4(OUTSIDE), network.v6(OUTSIDE)
        self.interface, self.subnet = network.uplink, network.subnet
        self._network = network
        self._ssh = Ssh(directory)
        self._hosts: list[Namespace] = []
        self._servers: list[int] = []

    @classmethod
    @contextlib.contextmanager
    def up(cls, count: int, *, ports: Sequence[int] = (), shared: Sequence[Path] = ()) -> Iterator[Hosts]:
        """So many hosts, which are gone at the end with all that runs in them.

        Args:
            count: how many.
            ports: where each one's sshd listens; 22 if there is none for it.
            shared: directories in /tmp or /root that all hosts see, besides this checkout and our Python.

        Raises:
            Failed: they cannot be made here.
        """
        STATE.mkdir(mode=0o755, exist_ok=True)
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd insists
        mark = f"kvt{os.getpid()}" + "abcdefghijklmnopqrstuvwxyz"[next(_numbers) % 26]
        with contextlib.ExitStack() as stack:
            with _alone():
                _sweep()
                directory = Path(tempfile.mkdtemp(prefix=f"{mark}-", dir=STATE))
                stack.callback(shutil.rmtree, directory, ignore_errors=True)
                held = os.open(directory, os.O_RDONLY)  # which says that somebody uses it
                stack.callback(os.close, held)
                fcntl.flock(held, fcntl.LOCK_EX)
                network = Network(mark, directory)
            stack.callback(network.end)
            names = [f"{mark}-{number}" for number in range(1, count + 1)]
            hosts = cls(directory, network, names, [*ports, *[22] * count][:count])
            stack.callback(hosts.end)
            hosts.begin([ROOT, Path(sys.prefix), Path(sys.base_prefix), *shared])
            yield hosts

    def __len__(self) -> int:
        return len(self.names)

    @property
    def ssh_config(self) -> Path:
        """All that ``ssh -F`` needs to log in as root, by name or by address."""
        return self._ssh.config

    @property
    def portless_ssh_config(self) -> Path:
        """The same, without the ports: who connects must say them."""
        return self._ssh.portless

    def hostfile(self) -> Path:
        """A new file with a line for each host."""
        path = self.directory / f"hostfile-{len(list(self.directory.iterdir()))}"
        path.write_text("\n".join(self.addresses) + "\n")
        return path

    @property
    def launcher_env(self) -> dict[str, str]:
        """The environment of who starts jobs from outside the hosts: its ``ssh`` and ``rsync`` know how to log in."""
        programs = self.directory / "bin"
        if not programs.exists():
            programs.mkdir()
            ssh = shutil.which("ssh")
            (programs / "ssh").write_text(f'#!/bin/sh\nexec {ssh} -F {self.ssh_config} "$@"\n')
            (programs / "ssh").chmod(0o755)
        return os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}

    def enter(self, i: int, argv: Sequence[str], cwd: Path | str | None = None) -> list[str]:
        """The command line that runs ``argv`` on a host, without ssh. A signal to it does not reach ``argv``."""
        return self._hosts[i].enter(argv, cwd)

    def run(
        self,
        i: int,
        argv: Sequence[str],
        *,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        text: str | None = None,
        timeout: float = LONG,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``argv`` on a host to its end, without ssh."""
        return self._hosts[i].run(argv, cwd=cwd, env=env, text=text, timeout=timeout)

    def processes(self, i: int) -> dict[int, str]:
        """What runs on a host, besides its sshd: the command lines, by the process numbers out here."""
        return {pid: line for pid, line in self._hosts[i].processes().items() if pid != self._servers[i]}

    def shared_memory(self, i: int) -> list[str]:
        """The names of what is in a host's /dev/shm."""
        return sorted(path.name for path in Path(f"/proc/{self._hosts[i].pid}/root/dev/shm").iterdir())

    def cut(self, i: int) -> None:
        """Take a host off the network: all is lost, in silence."""
        self._network.cut(i + 1)

    def answers(self, i: int) -> bool:
        """Whether host ``i``'s sshd can be reached now."""
        try:
            with socket.create_connection((self.addresses[i], self.ports[i]), 1.0) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    def mend(self, i: int) -> None:
        """Put a host back on the network."""
        self._network.mend(i + 1)

    def crash(self, i: int) -> None:
        """A host loses its power, for good."""
        self.cut(i)
        self._hosts[i].end()

    def clear(self) -> None:
        """Mend all that is cut, and kill all that runs on the hosts."""
        for i, host in enumerate(self._hosts):
            if host.alive:
                self.mend(i)
                until(partial(self._killed, i), f"the processes of host {i} to die")
                self.run(i, ["find", "/dev/shm", "-mindepth", "1", "-delete"])

    def _killed(self, i: int) -> bool:
        running = self.processes(i)
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not running

    def begin(self, shared: Sequence[Path]) -> None:
        known = zip(self.names, self.addresses, self.addresses6, strict=True)
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines += [f"{address} {name}" for name, *both in known for address in both]
        (self.directory / "hosts").write_text("\n".join(lines) + "\n")
        (self.directory / "shadow").write_text("root:*:19000:0:99999:7:::\n")
        (self.directory / "shadow").chmod(0o640)
        within = {path for path in map(Path.resolve, shared) if set(PRIVATE) & set(path.parents)}
        lines = [f"private {path}\n" for path in PRIVATE] + [f"shared {path}\n" for path in sorted(within)]
        (self.directory / "own").write_text("".join(lines))
        self.directory.chmod(0o711)
        logins = []
        for number, name in enumerate(self.names, 1):
            address, address6, port = self.addresses[number - 1], self.addresses6[number - 1], self.ports[number - 1]
            login = Login((name, address, address6), address, port)
            server = self._ssh.server(number, login)
            disk = self.directory / f"disk{number}"
            disk.mkdir()
            words = [name, f"{self.directory}", f"{disk}", f"{self.directory / 'own'}", *server]
            host = Namespace(INIT, words, OWN, self.directory / f"init{number}.log")
            self._hosts.append(host)
            self._network.plug(host, number)
            host.go()
            logins.append(login)
        self._ssh.write(logins)
        for i in range(len(self)):
            until(partial(self.answers, i), f"the sshd of host {i}")
            self._servers += self._hosts[i].children()
            until(partial(self._idle, i), f"the sshd of host {i} to be done with us")

    def _idle(self, i: int) -> bool:
        return not self.processes(i)

    def end(self) -> None:
        for host in self._hosts:
            host.end()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """While this lasts, no other run makes hosts, so that no two take one subnet."""
    fd = os.open(STATE, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _sweep() -> None:
    """Remove the files of runs that were killed; all else of theirs is gone with them."""
    for directory in STATE.iterdir():
        with contextlib.suppress(OSError):
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(fd)
