"""ssh to hosts that are namespaces: an sshd in each, with keys of its own, and what clients need to log in.

The keys and all other files lie in a directory that only root may read, and are gone at the end. A login sees what
every process of the host sees: the host's network, its name, and its /dev/shm.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.jobs import ROOT, Place, Unavailable

# Programs of the superuser are not on everybody's PATH.
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
START_S = 10.0
# Root may be locked on this machine, and its names say nothing of the hosts. Both mounts are sshd's and its children's.
SCRIPT = 'mount --bind "$0/hosts" /etc/hosts && mount --bind "$0/shadow" /etc/shadow && exec "$@"'


@dataclass(frozen=True)
class Ssh:
    """What logs in at hosts.

    Attributes:
        places: the hosts.
        folder: where the files are.
    """

    places: Sequence[Place]
    folder: Path

    @property
    def config(self) -> Path:
        """The file that ``ssh -F`` needs."""
        return self.folder / "ssh_config"

    def hostfile(self, places: Sequence[Place], processes: int) -> Path:
        """Write a file with a line for each of ``places``, in the form that ``launch.py`` and Open MPI share.

        Args:
            places: some of the hosts.
            processes: how many there will be on all of them, spread evenly.
        """
        slots = -(-processes // len(places))
        path = self.folder / f"hosts-{places[0].address}-{len(places)}-{slots}"
        path.write_text("".join(f"{place.address} slots={slots}\n" for place in places))
        return path


def require() -> None:
    """Raise ``Unavailable`` unless this machine has OpenSSH, client and server."""
    missing = [tool for tool in ("ssh", "sshd", "ssh-keygen") if shutil.which(tool, path=PATH) is None]
    if missing:
        raise Unavailable(
            f"jobs over ssh need {' and '.join(missing)}; "
            "on Debian and Ubuntu: apt-get install openssh-client openssh-server"
        )


@contextlib.contextmanager
def logins(places: Sequence[Place]) -> Iterator[Ssh]:
    """Start an sshd on each host; at the end of the block they are ended, and the keys are removed.

    Args:
        places: hosts of ``benchmarks.hosts``.

    Raises:
        Unavailable: OpenSSH is missing, or an sshd does not answer; the message says why.
    """
    require()
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd insists
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-ssh-")))  # of mode 0700
        made = Ssh(places, folder)
        _write(made)
        for place in places:
            server = [shutil.which("sshd", path=PATH) or "sshd", "-D", "-f", str(folder / f"sshd-{place.namespace}")]
            log = stack.enter_context((folder / f"log-{place.namespace}").open("wb"))
            process = subprocess.Popen(
                place.wrap(["sh", "-c", SCRIPT, str(folder), *server, "-e"]), stdin=subprocess.DEVNULL, stderr=log
            )
            stack.callback(_end, process)
        for place in places:
            _await(made, place)
        yield made


def sshd_config(folder: Path, place: Place) -> str:
    """Return the configuration of the sshd of a host.

    A login finds the packages of this checkout, as one on a cluster finds what has been installed there.
    """
    return f"""\
ListenAddress {place.address}
HostKey {folder}/hostkey
AuthorizedKeysFile {folder}/id.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups 500
MaxSessions 500
PrintMotd no
PrintLastLog no
SetEnv PYTHONPATH={ROOT}
"""


def client_config(folder: Path) -> str:
    """Return the configuration of a client, which needs nothing of the user's own."""
    return f"""\
Host *
  User root
  IdentityFile {folder}/id
  IdentitiesOnly yes
  IdentityAgent none
  StrictHostKeyChecking yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  UpdateHostKeys no
  LogLevel ERROR
"""


def _write(ssh: Ssh) -> None:
    """Write the keys and the configurations."""
    folder = ssh.folder
    for name in ("id", "hostkey"):
        _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)])
    ssh.config.write_text(client_config(folder))
    public = (folder / "hostkey.pub").read_text()
    (folder / "known_hosts").write_text("".join(f"{place.address} {public}" for place in ssh.places))
    names = [f"{place.address} {place.namespace}\n" for place in ssh.places]
    (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *names]))
    (folder / "shadow").write_text("root:*:19000:0:99999:7:::\n")
    for place in ssh.places:
        (folder / f"sshd-{place.namespace}").write_text(sshd_config(folder, place))


def _await(ssh: Ssh, place: Place) -> None:
    """Return when a host's sshd lets us in, asked from the host itself."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            _run(place.wrap(["ssh", "-F", str(ssh.config), place.address, "true"]))
        except Unavailable as error:
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            log = (ssh.folder / f"log-{place.namespace}").read_text().strip().splitlines()
            raise Unavailable(f"no sshd in {place.namespace}: {(log or [str(error)])[-1]}") from None
        return


def _run(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"`{' '.join(argv)}` failed: {done.stderr.strip() or done.returncode}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()
