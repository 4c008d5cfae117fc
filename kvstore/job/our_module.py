"""A program that executes one of the project's modules, whatever the user's modules are called.

``python -m servers`` would take a folder ``servers`` of the working directory or of PYTHONPATH. So the project's
processes execute this file, by its path, with the name of the module:

    python our_module.py servers
    python our_module.py --idle SECONDS kvstore.member.pulse

It imports only the standard library. Its folder is not on the module path, because names such as ``files`` are common.
"""

from __future__ import annotations

import os
import runpy
import select
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

PACKAGES = ("kvstore", "launcher", "servers", "workers")
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # noqa: PTH120 (imports little)


class OurPackages:  # no importlib.abc.MetaPathFinder, whose module takes each process 10 ms
    """Finds the project's packages in its own directory. Modules in them are found through their packages."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [ROOT]) if fullname in PACKAGES else None


def idle(seconds: float) -> None:
    """Wait, unless whoever has the other end of standard input closes it: then there is nothing left to do."""
    poll = select.poll()
    poll.register(sys.stdin, 0)  # the end alone, not the bytes that are there for the module
    if poll.poll(1000 * seconds):
        sys.exit()


def main() -> None:
    if sys.argv[1] == "--idle":
        idle(float(sys.argv[2]))
        del sys.argv[1:3]
    here = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != here]
    sys.meta_path.insert(0, OurPackages())
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
