"""Processes that come from one which has imported their modules already: a fork takes 10 ms, an import of torch 1.4 s.

A fork server (``serve``) imports, and then forks for each request that its starter sends (``ForkServer``). It passes
the child a socket, and does not read from it. The starter sends the child's environment over this socket once the child
exists. So no child inherits the keys of another one in its memory.

Its children are children of its starter (``CLONE_PARENT``), which signals them, waits for them and gets their exit
codes as if it had executed a program. The death of a fork server therefore costs no process.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kvstore.job import exec_helper
from kvstore.job.processes import EXECUTE_S, TiedProcess, child_request, files_of_children, show, words
from kvstore.job.settings import FORK, OMP_NUM_THREADS, REPLICAS, SETTINGS

# System call `clone`. Its last two arguments are in another order on ARM; both are given by _clone.
_SYSCALLS = {"x86_64": 56, "aarch64": 220}
_CLONE_PARENT, _CHILD_CLEARTID, _CHILD_SETTID = 0x00008000, 0x00200000, 0x01000000
_PR_GET_TID_ADDRESS = 40
_STREAMS = 3
_MOST_FDS = 16
_MORE = 1024  # bytes of variables that a child may have beside those that are known when the fork server is started
_ROOM = " " * 16  # in the command line of a fork server, for the names of its children


def can_fork() -> bool:
    """Whether this system has what a fork server needs; if not, each process imports for itself."""
    return sys.platform == "linux" and platform.machine() in _SYSCALLS


# What makes the project's own servers, standbys and aggregators.
FORK_SERVER = words(sys.executable, "servers.fork_server")
# In what the environments of one fork server's children may differ: in what they read themselves, after the fork.
# OMP_NUM_THREADS takes effect then, too (servers/fork_server.py).
_READ_LATE = frozenset(
    name for one in SETTINGS for name in (one.name, *one.aliases) if name.startswith(("DMLC_", "KVSTORE_"))
) | {OMP_NUM_THREADS.name}
# numpy starts threads of its BLAS when it is imported, and a process with threads cannot be forked safely.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


def alike(servers: Mapping[int, tuple[Sequence[str], Mapping[str, str]]]) -> tuple[frozenset[int], dict[str, str]]:
    """Which servers of a host come from one fork server, and its environment.

    None do if that saves nothing: if there is only one, and it is not started again when it dies.

    Args:
        servers: the words and the environment of each server, standby and aggregator.
    """
    ours = words(sys.executable, "servers")
    environments = {index: env for index, (argv, env) in servers.items() if tuple(argv[: len(ours)]) == ours}
    first, *others = environments.values() or ({},)
    if not (can_fork() and FORK.read(first)):
        return frozenset(), {}
    common = dict(set(first.items()).intersection(*(env.items() for env in others)))
    fit = frozenset(index for index, env in environments.items() if env.keys() - common.keys() <= _READ_LATE)
    again = REPLICAS.read(first) > 0
    if len(fit) <= (0 if again else 1):
        return frozenset(), {}
    # Room for what the kernel shows as a child's environment; children get some variables more.
    most = max(
        sum(len(os.fsencode(f"{name}={value} ")) for name, value in env.items()) for env in environments.values()
    )
    return fit, {**_ONE_THREAD, **common, "_": " " * (most + _MORE)}


class Forked:
    """A process that a fork server makes, with what ``subprocess.Popen`` has of it. ``pid`` is 0 until it exists."""

    def __init__(self, channel: socket.socket, request: bytes) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self._channel, self._request = channel, request

    def begin(self, pid: int) -> None:
        """It exists: tell it what to become. A process that is not told so ends."""
        self.pid = pid
        with self._channel as channel, suppress(OSError):  # it has ended
            channel.settimeout(EXECUTE_S)
            channel.sendall(self._request)

    def give_up(self) -> None:
        self._channel.close()

    def poll(self) -> int | None:
        if self.returncode is None and self.pid:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has reaped it, and knows the code
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        if self.pid and self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Wait until it has ended, if it exists."""
        while self.pid and self.poll() is None:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)


class ForkServer:
    """A fork server, as its starter sees it.

    Args:
        argv: what it executes, which calls ``serve`` with the number that is added to these words.
        env: its environment: what the environments of all its children have in common.
        keeper_fd: as of ``TiedProcess``.
        stderr: what it writes to while it imports.

    Attributes:
        asked: processes that do not exist yet, in the order of the requests, which is the order of the answers.
        ended: whether it has ended, as far as `collect` knows. What was asked for will not exist.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], keeper_fd: int, stderr: int) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.asked: list[Forked] = []
        self.ended = False
        with theirs:
            try:
                self._tied = TiedProcess(
                    (*argv, str(theirs.fileno()), _ROOM),
                    env,
                    pass_fds=(theirs.fileno(),),
                    keeper_fd=keeper_fd,
                    stdin=subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
                    start_new_session=True,
                )
            except BaseException:
                self._channel.close()
                raise

    @property
    def pid(self) -> int:
        return self._tied.process.pid

    def fileno(self) -> int:
        """Readable when there is something to ``collect``."""
        return self._channel.fileno()

    def execute(self) -> None:
        """Let it begin to import. Raises as ``TiedProcess.execute``; it has ended then."""
        self._channel.setblocking(False)
        try:
            self._tied.execute()
        except BaseException:
            self.close()
            raise

    def fork(self, argv: Sequence[str], env: Mapping[str, str], out: int, err: int, keeper_fd: int) -> Forked:
        """Ask for a process, with /dev/null as its standard input. It exists once ``collect`` has returned it.

        Args:
            argv: the words that ``ps`` shows, of which those after the second are the process's arguments.
            env: its whole environment.
            out, err: its standard output and error.
            keeper_fd: as of ``TiedProcess``; -1 for none.

        Raises:
            OSError: the fork server has ended, or does not read.
        """
        request = child_request(argv, env)
        ours, theirs = socket.socketpair()
        numbers = (os.getpid(), len(request), len(argv), files_of_children(), int(keeper_fd >= 0))
        with theirs, Path(os.devnull).open("rb") as nothing:
            fds = [theirs.fileno(), nothing.fileno(), out, err, *([keeper_fd] if keeper_fd >= 0 else [])]
            try:
                socket.send_fds(self._channel, [" ".join(map(str, numbers)).encode()], fds)
            except BaseException:
                ours.close()
                raise
        self.asked.append(Forked(ours, request))
        return self.asked[-1]

    def collect(self) -> list[Forked]:
        """Return the processes that exist now, and did not the last time."""
        made: list[Forked] = []
        while not self.ended:
            try:
                answer = self._channel.recv(32)
            except BlockingIOError:
                break
            except OSError:
                answer = b""
            if answer:
                made.append(self.asked.pop(0))
                made[-1].begin(int(answer))
            else:
                self.ended = True
        return made

    def close(self) -> list[Forked]:
        """End it; what it has forked lives on. Returns what it has forked meanwhile."""
        self._tied.process.kill()  # it has nothing to lose, and imports perhaps, for a second
        self._tied.process.wait()
        made = self.collect()
        for never in self.asked:
            never.give_up()
        self._channel.close()
        return made


def serve(channel: socket.socket) -> bool:
    """Fork for each request. Return True in a child, and False where the starter wants no more.

    Call it in a process of one thread, which has imported what the children need. A child returns with the standard
    streams, the environment, ``sys.argv`` and the limits that its request says, in a session of its own.
    """
    address = _tid_address()
    if not address or len(list(Path("/proc/self/task").iterdir())) > 1:
        return False  # a lock that another thread holds would be held in the children for ever
    with Path(os.devnull).open("r+b") as nothing:  # or the pipes of its starter would never end
        for number in (1, 2):
            os.dup2(nothing.fileno(), number)
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 256, _MOST_FDS)
        if not message:
            return False
        leads, writer = os.pipe()
        try:
            pid = _clone(address)
        except OSError:  # no more processes are allowed; the starter finds the same, and says so
            return False
        if not pid:
            os.setsid()
            os.close(writer)
            os.close(leads)
            channel.close()
            _become(*map(int, message.split()), *fds)
            return True
        for fd in (*fds, writer):
            os.close(fd)
        os.read(leads, 1)  # until it leads a process group: its starter may signal that as soon as it has the number
        os.close(leads)
        with suppress(OSError):
            channel.send(b"%d" % pid)


def _become(parent: int, size: int, words: int, files: int, keeper: int, channel: int, *fds: int) -> None:
    if keeper:
        exec_helper.announce(fds[_STREAMS])
    for number, fd in enumerate(fds[:_STREAMS]):
        os.dup2(fd, number)
        os.close(fd)
    request = exec_helper.read(channel, size)
    os.close(channel)
    exec_helper.limit(files)
    exec_helper.die_with(parent)
    if len(request) < size:
        os._exit(exec_helper.FAILED)  # the parent has given up
    fields = request.split(b"\0")[:-1]
    os.environb.clear()
    os.environb.update(dict(field.split(b"=", 1) for field in fields[words:]))
    sys.argv[1:] = map(os.fsdecode, fields[3:words])
    show(fields[:words], fields[words:])


_libc = ctypes.PyDLL(
    None, use_errno=True
)  # it holds the interpreter's lock: a child has no other thread to take it from


def _tid_address() -> int:
    """Where the C library keeps the number of the main thread, which the kernel has to set in a child; 0 if unknown."""
    address = ctypes.c_size_t(0)
    failed = _libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0)
    return 0 if failed else address.value


def _clone(tid_address: int) -> int:
    """Fork as ``os.fork`` does, but as a child of this process's parent."""
    flags = _CLONE_PARENT | _CHILD_SETTID | _CHILD_CLEARTID | signal.SIGCHLD
    tail = (ctypes.c_size_t(tid_address), ctypes.c_size_t(0))
    arguments = tail if platform.machine() == "x86_64" else tail[::-1]
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(_libc.syscall(_SYSCALLS[platform.machine()], ctypes.c_long(flags), None, None, *arguments))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return pid
