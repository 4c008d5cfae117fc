"""Modules of the user's that hide packages of the project: ``workers.py`` beside a script that imports ``workers``.

The project's own processes are not concerned: ``our_module`` starts them.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from kvstore.job.our_module import ROOT

IN_SCRIPTS = ("kvstore", "workers")  # what training scripts import


class Shadow(NamedTuple):
    """A module that hides a package of the project.

    Args:
        name: the name of both.
        theirs: the user's file.
        ours: the directory of the package.
    """

    name: str
    theirs: Path
    ours: Path

    def __str__(self) -> str:
        return (
            f"`import {self.name}` takes {self.theirs}, which hides the package {self.ours}; "
            "rename the file, unless that is meant"
        )


def shadows(directories: Iterable[str], names: Iterable[str] = IN_SCRIPTS) -> list[Shadow]:
    """The modules that hide packages of the project.

    Args:
        directories: the directories in which Python looks before it comes to the project's.
        names: the packages.
    """
    found = []
    path = list(directories)
    for name in names:
        spec = PathFinder.find_spec(name, path)
        if spec is None or not spec.has_location or spec.origin is None:
            continue  # a folder without __init__.py hides nothing
        theirs, ours = Path(spec.origin).absolute(), Path(ROOT, name)
        if theirs.resolve().parent != ours:
            found.append(Shadow(name, theirs, ours))
    return found
