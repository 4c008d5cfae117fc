"""Keys and configurations for ssh, in both directions: every host is known in advance, and is checked."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.missing import find
from cluster.namespaces import call, environment


@dataclass(frozen=True)
class Login:
    """One host, as ssh sees it: its names, the first of which is not an address, and its port."""

    names: tuple[str, ...]
    address: str
    port: int


class Ssh:
    """A key that logs in everywhere, and configurations that need nothing of the user's own.

    Args:
        directory: for all the files; only root may read it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key("id")
        (directory / "authorized_keys").write_text((directory / "id.pub").read_text())
        self.config = directory / "ssh_config"
        self.portless = directory / "ssh_config_without_ports"
        self._known = directory / "known_hosts"
        self._extra = self._spoken()

    def server(self, number: int, login: Login) -> list[str]:
        """The command line of the sshd of a host, in the foreground; makes its key."""
        key = self._key(f"hostkey{number}")
        with self._known.open("a") as known:
            for name in login.names:
                place = name if login.port == 22 else f"[{name}]:{login.port}"
                known.write(f"{place} {key.with_suffix('.pub').read_text()}")
        config = self._directory / f"sshd{number}.conf"
        config.write_text(f"""\
Port {login.port}
HostKey {key}
AuthorizedKeysFile {self._directory}/authorized_keys
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
Subsystem sftp internal-sftp
{self._extra}""")
        return [find("sshd") or "sshd", "-D", "-f", f"{config}", "-E", f"{config.with_suffix('.log')}"]

    def write(self, logins: Sequence[Login]) -> None:
        """Write what ``ssh -F`` reads."""
        common = f"""\
Host *
  User root
  IdentityFile {self._directory}/id
  IdentitiesOnly yes
  IdentityAgent none
  StrictHostKeyChecking yes
  UserKnownHostsFile {self._known}
  GlobalKnownHostsFile /dev/null
  UpdateHostKeys no
"""
        names = "".join(f"Host {login.names[0]}\n  HostName {login.address}\n" for login in logins)
        ports = "".join(f"Host {' '.join(login.names)}\n  Port {login.port}\n" for login in logins)
        self.config.write_text(names + ports + common)
        self.portless.write_text(names + common)

    def _key(self, name: str) -> Path:
        path = self._directory / name
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", f"{path}")
        return path

    def _spoken(self) -> str:
        """Settings that only newer ones know: those hold failed logins against whoever tries again."""
        line = "PerSourcePenalties no\n"
        probe = self._directory / "probe.conf"
        probe.write_text(f"HostKey {self._directory}/id\n{line}")
        asked = [find("sshd") or "sshd", "-t", "-f", f"{probe}"]
        known = subprocess.run(asked, capture_output=True, check=False, env=environment()).returncode == 0
        return line if known else ""
