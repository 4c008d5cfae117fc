"""How processes of ours are started: what they run, with which environment and limits, and that they end with us."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_STREAM_BYTES = 1 << 20  # copies of so much go past the caches: a tenth to a fifth faster where memory is the limit
_HELPER = Path(__file__).with_name("exec_helper.py")
EXECUTE_S = 60.0  # for a new interpreter to begin, which takes a twentieth of a second where nothing else runs
MAX_FILES = 1 << 16  # what who listens may have open: each connection is a file, a stranger's too until it is refused
_files: int | None = None  # how many this process was given, once it has taken more


def words(python: str, module: str) -> tuple[str, ...]:
    """What executes a module of ours; ``-P``: a folder of its name where the user is, is the user's."""
    return (python, *(("-P",) if sys.version_info >= (3, 11) else ()), "-m", module)


def source_root() -> str | None:
    """The directory that holds our packages if that is a clone; None if they are installed."""
    root = str(Path(__file__).resolve().parents[2])
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

    A ``TiedProcess`` gets what this process was given.
    """
    global _files
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        _files = soft


class TiedProcess:
    """A process that executes a program, and that Linux kills when the thread ends that has made it, or its process.

    Made in two steps, so that several can start at the same time: the first starts an interpreter, which takes a
    moment, and ``execute`` lets it become the program.

    Args:
        argv: the program and its arguments.
        env: its whole environment; the program is looked for on the PATH in it.
        pass_fds: the file descriptors that it inherits besides its standard streams.
        keeper_fd: a pipe that is told of the process before the program runs; -1 if there is none.
        popen: more arguments for ``subprocess.Popen``, such as ``stdin`` and ``start_new_session``.

    Attributes:
        process: may be waited for, or killed, at any time.

    Raises:
        OSError: the system allows no more processes or open files.
        ValueError: a word or a variable cannot be passed to a program.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        pass_fds: Sequence[int] = (),
        keeper_fd: int = -1,
        **popen: Any,
    ) -> None:
        self._program = argv[0]
        self._request = _request(argv, env)
        self._channel, theirs = socket.socketpair()
        files = -1 if _files is None else _files
        numbers = (os.getpid(), theirs.fileno(), len(self._request), len(argv), files, keeper_fd)
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_HELPER), *map(str, numbers)],
                    pass_fds=tuple({theirs.fileno(), keeper_fd, *pass_fds} - {-1}),
                    **popen,
                )
            except BaseException:
                self._channel.close()
                raise

    def execute(self, timeout_s: float = EXECUTE_S) -> None:
        """Let the process become the program, and wait until it has. To be called once; if it raises, the process ends.

        It returns too if the process ends before it could: ``process`` tells how.

        Raises:
            OSError: the program cannot be executed.
            TimeoutError: the process has not begun in time.
        """
        with self._channel:
            try:
                answer = self._converse(timeout_s)
            except BaseException:
                if self.process.returncode is None:
                    os.kill(self.process.pid, signal.SIGKILL)  # unlike Popen.kill, which may reap it
                raise
        if answer:
            raise OSError(int(answer), os.strerror(int(answer)), self._program)

    def _converse(self, timeout_s: float) -> bytes:
        """Send the request; return the answer, which is empty if all is well or the process has ended."""
        deadline = time.monotonic() + timeout_s
        self._channel.settimeout(timeout_s)
        try:
            self._channel.sendall(self._request)
            return self._channel.recv(16)
        except (BrokenPipeError, ConnectionResetError):
            return b""
        except TimeoutError:
            if time.monotonic() < deadline:  # a signal handler's
                raise
            text = f"its process has not begun within {timeout_s:g} s"
            raise TimeoutError(errno.ETIMEDOUT, text, self._program) from None


def _request(argv: Sequence[str], env: Mapping[str, str]) -> bytes:
    """The program and its environment for ``exec_helper``."""
    named = {name: value for name, value in env.items() if name}  # exec takes no others, and nobody could read them
    if any("=" in name for name in named):
        raise ValueError(f"illegal name of an environment variable: {next(name for name in named if '=' in name)!r}")
    fields = [os.fsencode(field) for field in (*argv, *(f"{name}={value}" for name, value in named.items()))]
    if any(b"\0" in field for field in fields):
        raise ValueError("embedded null byte in a program's arguments or environment")
    return b"".join(field + b"\0" for field in fields)
