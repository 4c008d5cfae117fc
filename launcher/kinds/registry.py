"""The launchers by name, and the options that each of them takes.

Another package can bring launchers: each is an entry point in the group `kvstore.launchers`, and a `Kind`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from types import MappingProxyType

from kvstore.job.tracebacks import described
from launcher.errors import LaunchError
from launcher.job.description import Job, option
from launcher.kinds import kubernetes, local, mpi, sge, slurm, ssh, yarn
from launcher.kinds.kind import Kind

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "local": local.KIND,
        "ssh": ssh.KIND,
        "mpi": mpi.KIND,
        "slurm": slurm.KIND,
        "sge": sge.KIND,
        "yarn": yarn.KIND,
        "kubernetes": kubernetes.KIND,
    }
)

# What to do where a launcher does not take an option, by its field.
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "attach": ". A process on another host has no terminal: call debugpy.listen in one worker, by store.rank, and "
        "attach an editor to it"
    }
)


GROUP = "kvstore.launchers"


def kind_of(name: str) -> Kind | None:
    """The launcher of a name: one of ours, or else an installed package's; None if there is none."""
    if name in KINDS:  # first: looking through all installed packages takes longer than all else before a job starts
        return KINDS[name]
    for point in entry_points(group=GROUP, name=name):
        try:
            kind = point.load()
        except Exception as error:
            raise LaunchError(f"--launcher {name}: cannot import {point.value}: {described(error)}") from None
        if not isinstance(kind, Kind):
            raise LaunchError(f"--launcher {name}: {point.value} is a {type(kind).__name__}, not a launcher's Kind")
        return kind
    return None


def find(name: str, job: Job) -> Kind:
    kind = kind_of(name)
    if kind is None:
        raise LaunchError(f"--launcher {name} is not valid; valid: {', '.join(KINDS)}")
    for field in job.cluster.given():
        if field not in kind.takes:
            others = ", ".join(other for other, candidate in KINDS.items() if field in candidate.takes) or "none"
            raise LaunchError(
                f"--launcher {name} does not take {option(field)}; leave it out (launchers that take it: {others})"
                f"{INSTEAD.get(field, '')}"
            )
    return kind
