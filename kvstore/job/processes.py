"""How the project's processes are started, called, and have ended: commands, environment, limits, names, exit codes.

Each ends with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STREAM_BYTES = 1 << 20  # larger copies bypass the caches: 10 to 20 % faster where memory is the limit
_HELPER = Path(__file__).with_name("exec_helper.py")
_OUR_MODULE = Path(__file__).resolve().with_name("our_module.py")
EXECUTE_S = 60.0  # for a new interpreter to begin, which takes 0.05 s on an idle machine
MAX_FILES = 1 << 16  # open files of a process that listens: each connection is one, even a stranger's
given_files: int | None = None  # the limit that this process was started with, once it has raised it


def words(python: str, module: str, idle_s: float = 0.0) -> tuple[str, ...]:
    """The command that executes one of our modules, even if a module of the user's has the same name.

    With `idle_s`, it imports nothing for so long, and ends at once if its standard input does meanwhile.
    """
    return (python, str(_OUR_MODULE), *(("--idle", str(idle_s)) if idle_s else ()), module)


def orphaned(command: Sequence[str]) -> list[str]:
    """Return a command that starts ``command``, prints its number, and ends, so that it is no child of the caller's.

    A program may wait for all of its children (``os.wait``), count them, or end them, and ours must not be among them.
    Ctrl-C is for the caller, and launchers send it to all processes of a job: the command ignores it from its start on.
    Its standard input is the caller's: a shell gives /dev/null to what it starts in the background, so the input takes
    a way around that, over another number. An interpreter between would take 20 ms to start, and a shell takes one.
    """
    return ["/bin/sh", "-c", 'trap "" INT; exec 9<&0; "$@" <&9 9<&- & echo $!', "sh", *command]


def source_root() -> str | None:
    """The directory of our packages if that is a clone; None if they are installed."""
    root = str(Path(__file__).resolve().parents[2])
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return None if root in installed or os.pathsep in root else root


def complete(env: Mapping[str, str], root: str | None) -> dict[str, str]:
    """Return ``env`` with what a member needs; ``root``: of packages that are not installed, last on PYTHONPATH."""
    # glibc takes the whole processor's caches for this process's, and so never lets large copies bypass them.
    usual = {"GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={_STREAM_BYTES:#x}"}
    # Lines appear when they are printed, not when a pipe's buffer is full.
    usual["PYTHONUNBUFFERED"] = "1"
    made = {**usual, **env}
    if root is not None:
        made["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), root]))
    return made


def allow_many_files() -> None:
    """Raise this process's limit of open files as far as it may: a shell's limit is low for a listener.

    A ``TiedProcess`` gets the original limit.
    """
    global given_files
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        given_files = soft


def files_of_children() -> int:
    """How many files a child may have open: as many as this process before it raised its limit; -1 for no change."""
    return -1 if given_files is None else given_files


class TiedProcess:
    """A process that executes a program, and that Linux kills when the thread that made it ends, or its process.

    It is made in two steps, so that several can start at the same time. The first starts an interpreter, which takes a
    moment. Then ``execute`` lets it become the program.

    Args:
        argv: the program and its arguments.
        env: its whole environment. The program is looked up on this environment's PATH.
        pass_fds: the file descriptors that it inherits besides its standard streams.
        keeper_fd: a pipe to which the process writes its id before the program runs; -1 for none.
        popen: more arguments for ``subprocess.Popen``, such as ``stdin`` and ``start_new_session``.

    Attributes:
        process: the process, which may be waited for or killed at any time.

    Raises:
        OSError: the system allows no more processes or open files.
        ValueError: an argument or a variable cannot be passed to a program.
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
        self._request = child_request(argv, env)
        self._channel, theirs = socket.socketpair()
        numbers = (os.getpid(), theirs.fileno(), len(self._request), len(argv), files_of_children(), keeper_fd)
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
        """Let the process become the program, and wait until it has. Call it once. If it raises, the process ends.

        If the process ends before it has become the program, this returns, and ``process`` tells how.

        Raises:
            OSError: the program cannot be executed.
            TimeoutError: the process has not begun in time.
        """
        with self._channel:
            try:
                answer = self._converse(timeout_s)
            except BaseException:
                if self.process.returncode is None:
                    # Unlike Popen.kill, which polls first and so may reap the process: its owner is to learn its end.
                    os.kill(self.process.pid, signal.SIGKILL)
                raise
        if answer:
            raise OSError(int(answer), os.strerror(int(answer)), self._program)

    def _converse(self, timeout_s: float) -> bytes:
        """Send the request; return the answer, which is empty on success, or if the process has ended."""
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


def child_request(argv: Sequence[str], env: Mapping[str, str]) -> bytes:
    """What a child is told to become: its arguments, then its environment, each with a null byte at its end."""
    named = {name: value for name, value in env.items() if name}  # exec refuses empty names
    if any("=" in name for name in named):
        raise ValueError(f"illegal name of an environment variable: {next(name for name in named if '=' in name)!r}")
    fields = [os.fsencode(field) for field in (*argv, *(f"{name}={value}" for name, value in named.items()))]
    if any(b"\0" in field for field in fields):
        raise ValueError("embedded null byte in a program's arguments or environment")
    return b"".join(field + b"\0" for field in fields)


_SIGNALS = frozenset(map(int, signal.Signals))


def signal_name(signum: int) -> str:
    """``SIGKILL`` for 9, ``signal 42`` if it has none."""
    return signal.Signals(signum).name if signum in _SIGNALS else f"signal {signum}"


@dataclass(frozen=True)
class Exit:
    """How a process ended: with a code, by a signal, or, on another host, as `text` says."""

    code: int = 0
    signum: int = 0
    text: str = ""

    @classmethod
    def of(cls, returncode: int) -> Exit:
        """By what ``subprocess`` says: the code, or the negative number of the signal."""
        return cls(code=max(returncode, 0), signum=max(-returncode, 0))

    @property
    def status(self) -> int:
        """The exit status in a shell: 128 + N after signal N."""
        return 128 + self.signum if self.signum else self.code

    def __str__(self) -> str:
        if self.text:
            return self.text
        if self.signum:
            return f"was killed by {signal_name(self.signum)}"
        # A shell exits so if its program was killed.
        hint = f" (128 + {signal_name(self.code - 128)})" if self.code - 128 in _SIGNALS else ""
        return f"exited with code {self.code}{hint}"


# Linux keeps a name for a process beside its command line. The command line is the user's, so a worker is found by the
# name in `ps -e`, `top` and `pgrep`, and by its script in `ps aux`.
_LONGEST = 15  # bytes of a name that Linux keeps
_COMM = Path("/proc/self/comm")  # that of the main thread, whichever thread writes; prctl would name the calling one
_named: tuple[str, str] | None = None  # what this process was called before, and is called now


def host_name() -> str:
    return socket.gethostname().encode(errors="replace").decode()


def title(role: str, rank: int) -> str:
    """Return the name of a member's process: ``worker-3``, as its log file; the role alone where no rank is known."""
    return role if role == "scheduler" or rank < 0 else f"{role}-{rank}"


def entitle(role: str, rank: int) -> None:
    """Call this process after what it is, unless its program has given it a name."""
    global _named
    before = _comm()
    if before in _given():
        _named = before, title(role, rank)[:_LONGEST]
        _set_comm(_named[1])


def show(words: Sequence[bytes], variables: Sequence[bytes]) -> None:
    """Let ``ps`` and ``/proc`` show these words and ``NAME=value`` as what this process was started with, if they fit.

    The kernel reads both from where it has put them when the process began. Nothing may use the old variables: see
    ``os.environ.clear``.
    """
    with contextlib.suppress(OSError, ValueError):
        # "pid (name) state ...": the state is the third field, and arg_start to env_end are the 48th to the 51st.
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        ends = list(map(int, fields[45:49]))
        for start, end, strings in zip(ends[::2], ends[1::2], (words, variables), strict=True):
            text = b"".join(string + b"\0" for string in strings)
            if start and len(text) <= end - start:
                ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _forget() -> None:
    """Be called as before: a fork, such as a process of a DataLoader, is no member, and members are killed by name."""
    if _named is not None and _comm() == _named[1]:
        _set_comm(_named[0])


os.register_at_fork(after_in_child=_forget)


def _given() -> set[str]:
    """Return what the system calls a process by itself: the file that it executes."""
    files = (sys.executable, os.path.realpath(sys.executable), *sys.orig_argv[:1], *sys.argv[:1])
    return {os.fsdecode(os.fsencode(Path(file).name)[:_LONGEST]) for file in files}


def _comm() -> str:
    try:
        return os.fsdecode(_COMM.read_bytes().removesuffix(b"\n"))
    except OSError:  # no Linux
        return ""


def _set_comm(name: str) -> None:
    with contextlib.suppress(OSError):
        _COMM.write_bytes(os.fsencode(name))
