"""Open MPI and MPICH as a user of the hosts has them: an ``mpirun`` on the PATH, and settings that reach the hosts."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from cluster.hosts import Hosts
from cluster.missing import find, need
from waiting import LONG

KINDS = ("openmpi", "mpich")


@dataclass(frozen=True)
class Mpi:
    """One kind of MPI over some hosts.

    Attributes:
        kind: ``openmpi`` or ``mpich``.
        path: a directory, to be put first on the PATH, in which ``mpirun`` is of this kind.
        env: a whole environment, with that PATH, in which a plain ``mpirun`` reaches the hosts.
    """

    kind: str
    path: Path
    env: dict[str, str]
    hosts: Hosts

    def run(self, *words: str, text: str | None = None, timeout: float = LONG) -> subprocess.CompletedProcess[str]:
        """``mpirun`` with these words, to its end."""
        return subprocess.run(
            ["mpirun", *words], env=self.env, input=text, capture_output=True, text=True, check=False, timeout=timeout
        )


def mpi(kind: str, hosts: Hosts) -> Mpi:
    """One kind of MPI over these hosts; the test skips where it is not installed."""
    need(f"mpirun.{kind}")
    path = hosts.directory / kind
    path.mkdir(exist_ok=True)
    mpirun = path / "mpirun"
    if mpirun.exists():
        pass
    elif kind == "openmpi":
        mpirun.symlink_to(find("mpirun.openmpi") or "mpirun.openmpi")  # which says "Open MPI" only by this name
    else:
        mpirun.write_text('#!/bin/sh\nexec mpirun.mpich "$@"\n')  # which looks for its other programs beside a link
        mpirun.chmod(0o755)
    settings = _openmpi(hosts) if kind == "openmpi" else _mpich(hosts)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "HYDRA_", "PMI", "MPI"))}
    return Mpi(kind, path, env | settings | {"PATH": f"{path}{os.pathsep}{env['PATH']}"}, hosts)


def _openmpi(hosts: Hosts) -> dict[str, str]:
    return {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_plm": "rsh",  # whatever batch system this runs in
        "OMPI_MCA_plm_rsh_agent": f"ssh -F {hosts.ssh_config}",
        "OMPI_MCA_oob_tcp_if_include": hosts.subnet,
        "OMPI_MCA_btl_tcp_if_include": hosts.subnet,
        "OMPI_MCA_hwloc_base_binding_policy": "none",
    }


def _mpich(hosts: Hosts) -> dict[str, str]:
    return {
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXTRA_ARGS": f"-F {hosts.ssh_config}",
        "HYDRA_RMK": "user",
        "HYDRA_IFACE": hosts.interface,
    }
