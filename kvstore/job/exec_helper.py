"""A program that becomes another one, and does in the child what must be done between fork and exec.

Python code at that point (``preexec_fn``) can deadlock if the parent has threads: one of them may have held a lock when
the process was forked. So ``TiedProcess`` executes this file, by its path, in an interpreter that imports
neither our code nor the user's:

    python -I -S exec_helper.py PARENT CHANNEL SIZE WORDS FILES KEEPER

The arguments are numbers. The program and its environment come over CHANNEL, a socket, so that neither the command line
nor the interpreter's own environment shows them. What a fork server makes calls these functions, too.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
FAILED = 127  # the exit code if the program cannot be executed


def main(parent: int, channel: int, size: int, words: int, files: int, keeper: int) -> int:
    """Become the program. Return only if that fails, after telling the parent why.

    Args:
        parent: the process to end with.
        channel: a socket. The request comes in, and an error number may go out. It closes when the program runs.
        size: the size of the request in bytes. Each of its fields ends with a null byte.
        words: how many fields are the program's arguments. The others are its environment, each as ``NAME=value``.
        files: how many files the program may have open; -1 for no change.
        keeper: a pipe to write this process's id to before the program runs; -1 for none.
    """
    os.set_inheritable(channel, False)
    if keeper >= 0:
        announce(keeper)
    request = read(channel, size)
    limit(files)
    die_with(parent)
    if len(request) < size:
        return FAILED  # the parent has given up
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)  # Python ignores them, and the program would, too
    fields = request.split(b"\0")[:-1]
    argv, env = fields[:words], dict(field.split(b"=", 1) for field in fields[words:])
    try:
        os.execvpe(argv[0], argv, env)  # noqa: S606 (its purpose)
    except OSError as exc:
        os.write(channel, b"%d" % (exc.errno or errno.EIO))
    return FAILED


def announce(keeper: int) -> None:
    with suppress(BrokenPipeError):  # the keeper has died, and the parent tells the next one
        os.write(keeper, b"%d\n" % os.getpid())
    os.close(keeper)  # the keeper waits until nobody holds this


def read(channel: int, size: int) -> bytes:
    request = b""
    while len(request) < size and (data := os.read(channel, size - len(request))):
        request += data
    return request


def limit(files: int) -> None:
    if files >= 0:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def die_with(parent: int) -> None:
    """Have Linux kill this process when its parent ends, even after exec. No effect on other systems."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # The signal is for a death from now on only. If the parent died before, this process has another parent already.
    if os.getppid() != parent:
        os._exit(FAILED)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
