"""What Linux says of a process in /proc; raises ``OSError`` if it has gone."""

from __future__ import annotations

from pathlib import Path


def state(pid: int | str) -> str:
    """``T`` if it is stopped, ``Z`` if it has ended and nobody has asked how, another letter otherwise."""
    return _stat(pid)[0]


def parent(pid: int | str) -> int:
    return int(_stat(pid)[1])


def started(pid: int | str) -> int:
    return int(_stat(pid)[19])


def _stat(pid: int | str) -> list[str]:
    """The fields after its name, which may have spaces and brackets in it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
