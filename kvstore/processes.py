"""How processes of ours are started: what they run, with which environment and limits, and that they end with us."""

from __future__ import annotations

import os
import resource
import signal
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

_STREAM_BYTES = 1 << 20  # copies of so much go past the caches: a tenth to a fifth faster where memory is the limit
_PR_SET_PDEATHSIG = 1
MAX_FILES = 1 << 16  # what who listens may have open: each connection is a file, a stranger's too until it is refused
_files: int | None = None  # how many this process was given, once it has taken more


def words(python: str, module: str) -> tuple[str, ...]:
    """What executes a module of ours; ``-P``: a folder of its name where the user is, is the user's."""
    return (python, *(("-P",) if sys.version_info >= (3, 11) else ()), "-m", module)


def source_root() -> str | None:
    """The directory that holds our packages if that is a clone; None if they are installed."""
    root = str(Path(__file__).resolve().parents[1])
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return None if root in installed or os.pathsep in root else root


def complete(env: Mapping[str, str], root: str | None) -> dict[str, str]:
    """Return ``env`` with what a member of a job needs, where it says nothing else.

    Args:
        env: the environment so far.
        root: where the packages are, if they are not installed; it goes last on PYTHONPATH.
    """
    # glibc takes the caches of the whole processor for this process's, and so never copies large arrays past them.
    usual = {"GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={_STREAM_BYTES:#x}"}
    # Lines appear when they are printed, not when a pipe's buffer is full.
    usual["PYTHONUNBUFFERED"] = "1"
    made = {**usual, **env}
    if root is not None:
        made["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), root]))
    return made


def allow_many_files() -> None:
    """Let this process have as many open files as it may: what a shell gives is little for who listens.

    Children that are started with ``dying_with_us`` get what this process was given.
    """
    global _files
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        _files = soft


def dying_with_us(announce: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """Return what a child does between fork and exec so that, on Linux, it is killed when this process ends.

    Everything it needs is looked up here, before the fork.

    Args:
        announce: is called first, in the child.
    """
    import ctypes

    parent, files = os.getpid(), _files
    prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform.startswith("linux") else None

    def before_exec() -> None:
        announce()
        if files is not None:  # programs with select() cannot have more than a shell gives them
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
            if os.getppid() != parent:  # it died before that took effect
                os._exit(1)

    return before_exec
