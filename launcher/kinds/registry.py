"""The launchers by name, and the options that each of them takes.

Another package can bring launchers: each is an entry point in the group `kvstore.launchers`, and a `Kind`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from types import MappingProxyType

from kvstore.job.tracebacks import described
from launcher.errors import LaunchError
from launcher.job.description import Job, option
from launcher.kinds.kind import Kind


class _OurKinds(Mapping[str, Kind]):
    """Our launchers by name. Each is imported when it is asked for: most jobs are local, and need no pods or agents."""

    _names = ("local", "ssh", "mpi", "slurm", "sge", "yarn", "kubernetes")

    def __getitem__(self, name: str) -> Kind:
        if name not in self._names:
            raise KeyError(name)
        kind: Kind = import_module(f"launcher.kinds.{name}").KIND
        return kind

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


KINDS: Mapping[str, Kind] = _OurKinds()

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
    from importlib.metadata import entry_points  # brings email, csv and zipfile

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
