"""The peers to compare with, and their Python environments, which pip makes once, in a cache."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.jobs import Unavailable

PEERS = ("mxnet", "gloo", "openmpi", "sockets", "ray", "torchft")
# The last release; it uses names that later versions of numpy do not have, and those need Python 3.11 or older.
MXNET = ("mxnet==1.9.1", "numpy<1.24")
# Its wheel finds the library of whatever MPI starts it.
OPEN_MPI = ("mpi4py==4.1.2", "numpy")
RAY = ("ray==2.60.0", "numpy")
TORCHFT = ("torchft==0.2.0", f"torch=={torch.__version__.partition('+')[0]}", "numpy")
PYTHONS = ("python3.11", "python3.10", "python3.9")


@dataclass(frozen=True)
class Peers:
    """The chosen peers.

    Attributes:
        names: some of ``PEERS``.
        cache: where environments are made.
    """

    names: Sequence[str]
    cache: Path

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def mxnet(self) -> str:
        """Return the Python that has MXNet; make its environment if needed.

        Raises:
            Unavailable: it cannot be made here.
        """
        return _environment(self.cache / "mxnet", MXNET, "mxnet", old_python)

    def openmpi(self) -> str:
        """Return the Python that has mpi4py; make its environment if needed.

        Raises:
            Unavailable: it cannot be made here.
        """
        return _environment(self.cache / "openmpi", OPEN_MPI, "mpi4py", lambda: sys.executable)

    def ray(self) -> str:
        """Return the Python that has Ray; make its environment if needed.

        Raises:
            Unavailable: it cannot be made here.
        """
        return _environment(self.cache / "ray", RAY, "ray", lambda: sys.executable)

    def torchft(self) -> str:
        """Return the Python that has torchft, with our version of torch; make its environment if needed.

        Raises:
            Unavailable: it cannot be made here.
        """
        return _environment(self.cache / "torchft", TORCHFT, "torchft", lambda: sys.executable)


def default_cache() -> Path:
    """Return ``$KVSTORE_BENCH_PEERS``, or a directory in the user's cache."""
    chosen = os.environ.get("KVSTORE_BENCH_PEERS")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen) if chosen else caches / "kvstore-bench"


@functools.cache
def _environment(path: Path, packages: Sequence[str], module: str, base: Callable[[], str]) -> str:
    python = str(path / "bin" / "python")
    try:
        run([python, "-c", f"import {module}"])  # what was interrupted half-way is made again
    except Unavailable:
        print(f"making {path}: pip install {' '.join(packages)}", file=sys.stderr, flush=True)
        run([base(), "-m", "venv", "--clear", str(path)])
        run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages])
    return python


def old_python() -> str:
    """Return a Python for which there is an MXNet."""
    if sys.version_info < (3, 12):
        return sys.executable
    for name in PYTHONS:
        path = shutil.which(name)
        if path:
            return path
    raise Unavailable(f"MXNet 1.9.1 needs Python 3.11 or older, and there is none: {', '.join(PYTHONS)}")


def run(argv: Sequence[str]) -> None:
    """Run a command; raise ``Unavailable`` with its last line if it fails."""
    try:
        subprocess.run(argv, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise Unavailable(f"there is no {argv[0]}") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Unavailable(f"`{' '.join(argv)}` failed: {last}") from None
