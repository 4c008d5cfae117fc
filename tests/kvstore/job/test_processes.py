"""How processes are started: they have the words, environment, files and signals that they should, and end with us."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from proc import state
from waiting import LONG, until

from kvstore.job import exec_helper, processes
from kvstore.job.processes import Exit, TiedProcess

SHELL = "/bin/sh"
ENV = {"PATH": os.defpath, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def run(argv: Sequence[str], env: Mapping[str, str] = ENV, **options: Any) -> bytes:
    """What a program prints."""
    tied = TiedProcess(argv, env, stdout=subprocess.PIPE, **options)
    tied.execute()
    printed = tied.process.communicate(timeout=LONG)[0]
    assert tied.process.returncode == 0
    return printed


def failure(argv: Sequence[str], env: Mapping[str, str] = ENV) -> OSError:
    """The error of a program that cannot be executed; its process has ended."""
    tied = TiedProcess(argv, env)
    with pytest.raises(OSError) as caught:  # noqa: PT011 (the callers look closer)
        tied.execute()
    assert tied.process.wait(LONG) == exec_helper.FAILED
    return caught.value


def test_it_gets_its_words_and_its_environment_to_the_byte() -> None:
    odd = ["a b", "", "\n", "重み", os.fsdecode(b"\xff\xfe"), "-c"]
    printed = run([SHELL, "-c", 'for word in "$@"; do printf "<%s>" "$word"; done', "sh", *odd])
    assert printed == b"".join(b"<%s>" % os.fsencode(word) for word in odd)
    env = {"A": "1=2", "B": "", "LC_ALL": "C", "E": os.fsdecode(b"\xff"), "PYTHONHOME": "/nowhere", "": "no name"}
    printed = run(["/usr/bin/env", "-0"], env)
    expected = [b"%s=%s" % (os.fsencode(name), os.fsencode(value)) for name, value in env.items() if name]
    assert sorted(printed.rstrip(b"\0").split(b"\0")) == sorted(expected)


def test_an_interpreter_in_a_c_locale_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LC_CTYPE", "C")  # Python then sets it to C.UTF-8, for its children too
    assert run(["/usr/bin/env", "-0"], {"A": os.fsdecode(b"\xff")}) == b"A=\xff\0"


def test_it_is_looked_for_on_its_own_path(tmp_path: Path) -> None:
    (tmp_path / "program").write_text("#!/bin/sh\necho here\n")
    (tmp_path / "program").chmod(0o700)
    assert run(["program"], {"PATH": f"/nowhere:{tmp_path}"}) == b"here\n"
    assert failure(["program"], {"PATH": "/nowhere"}).errno == errno.ENOENT


def test_what_cannot_be_executed_is_the_error_of_exec(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    (tmp_path / "binary").write_bytes(b"\0")
    (tmp_path / "binary").chmod(0o700)
    error = failure([str(tmp_path / "none")])
    assert isinstance(error, FileNotFoundError)
    assert (error.strerror, error.filename) == (os.strerror(errno.ENOENT), str(tmp_path / "none"))
    assert isinstance(failure([str(tmp_path / "plain")]), PermissionError)
    assert failure([str(tmp_path / "binary")]).errno == errno.ENOEXEC
    assert failure([SHELL, "x" * (1 << 18)]).errno == errno.E2BIG


@pytest.mark.parametrize(
    ("argv", "env", "text"),
    [
        (["true", "a\0b"], {}, "embedded null byte"),
        (["true"], {"A": "\0"}, "embedded null byte"),
        (["true"], {"A=B": "C"}, "illegal name of an environment variable: 'A=B'"),
    ],
)
def test_what_no_program_can_get_is_refused(argv: list[str], env: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TiedProcess(argv, env)


SHOW = """
import json, os, resource, signal
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
print(json.dumps({
    "files": sorted(int(name) for name in os.listdir("/proc/self/fd")),
    "limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    "ignored": int(status["SigIgn"], 16),
    "blocked": int(status["SigBlk"], 16),
    "session": os.getsid(0) == os.getpid(),
}))
"""
# Python itself ignores SIGPIPE and SIGXFSZ; a shell says what it has inherited.
IGNORED = "sed -n 's/^SigIgn:[[:space:]]*//p' /proc/self/status"


def show(**options: Any) -> Any:
    return json.loads(run([sys.executable, "-S", "-c", SHOW], **options))


def test_it_has_no_files_but_those_it_was_given() -> None:
    alone = show()["files"]
    read, write = os.pipe()
    assert sorted({*alone, write}) == show(pass_fds=(write,))["files"]
    os.close(read)
    os.close(write)


def test_it_ignores_no_signals() -> None:
    assert int(run([SHELL, "-c", IGNORED]), 16) & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1) == 0
    assert show()["blocked"] == 0


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup launch.py ...
    try:
        assert int(run([SHELL, "-c", IGNORED]), 16) & 1 << signal.SIGHUP - 1
    finally:
        signal.signal(signal.SIGHUP, before)


def test_it_can_lead_a_session() -> None:
    assert not show()["session"]
    assert show(start_new_session=True)["session"]


def test_it_has_the_limit_that_this_process_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "given_files", None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        processes.allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
        assert show()["limit"] == 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_keeper_is_told_before_it_runs() -> None:
    read, write = os.pipe()
    tied = TiedProcess(["true"], ENV, keeper_fd=write)
    os.close(write)
    with open(read, "rb") as pipe:  # noqa: PTH123 (a file descriptor)
        assert pipe.read() == b"%d\n" % tied.process.pid  # and it holds the pipe no longer
    tied.execute()
    assert tied.process.wait(LONG) == 0


def test_a_keeper_that_has_died_is_no_obstacle() -> None:
    read, write = os.pipe()
    os.close(read)
    assert run(["echo", "here"], keeper_fd=write) == b"here\n"
    os.close(write)


def test_a_process_that_is_killed_before_it_runs_is_no_error() -> None:
    tied = TiedProcess(["echo", "x" * 100_000], ENV)
    tied.process.kill()
    assert tied.process.wait(LONG) == -signal.SIGKILL
    tied.execute()


def test_a_process_that_does_not_begin_is_one() -> None:
    tied = TiedProcess(["true"], ENV)
    os.kill(tied.process.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError, match=r"its process has not begun within 0\.1 s: 'true'"):
        tied.execute(0.1)
    assert tied.process.wait(LONG) == -signal.SIGKILL


def test_a_process_whose_start_is_interrupted_ends() -> None:
    def interrupt(_signal: int, _frame: object) -> None:
        raise TimeoutError("the user's")

    tied = TiedProcess(["true"], ENV)
    os.kill(tied.process.pid, signal.SIGSTOP)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(TimeoutError, match="the user's"):
            tied.execute()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert tied.process.wait(LONG) == -signal.SIGKILL


PARENT = """
import subprocess, sys, time
from kvstore.job.processes import TiedProcess
tied = TiedProcess(["sleep", "600"], {"PATH": "/usr/bin:/bin"})
if sys.argv[1] == "run":
    tied.execute()
print(tied.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["run", "prepare"])
def test_it_does_not_outlive_this_process(how: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, how], env=ENV, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    until(lambda: gone(child), "the child to end")


def gone(pid: int) -> bool:
    try:
        return state(pid) == "Z"
    except OSError:
        return True


# A lock that another thread holds when a process is forked is what code between fork and exec waits for, for ever.
LOCKED = """
import os, threading
from kvstore.job.processes import TiedProcess
lock = threading.Lock()
lock.acquire()
os.register_at_fork(after_in_child=lock.acquire)
tied = TiedProcess(["true"], {"PATH": "/usr/bin:/bin"})
tied.execute()
print(tied.process.wait())
"""


def test_what_threads_hold_does_not_matter() -> None:
    done = subprocess.run([sys.executable, "-c", LOCKED], env=ENV, capture_output=True, timeout=LONG, check=True)
    assert done.stdout == b"0\n"


@pytest.mark.parametrize(
    ("how", "text", "status"),
    [
        (Exit(), "exited with code 0", 0),
        (Exit(code=7), "exited with code 7", 7),
        (Exit(code=137), "exited with code 137 (128 + SIGKILL)", 137),
        (Exit(code=255), "exited with code 255", 255),
        (Exit(signum=9), "was killed by SIGKILL", 137),
        (Exit(signum=42), "was killed by signal 42", 170),
    ],
)
def test_how_it_is_said(how: Exit, text: str, status: int) -> None:
    assert (str(how), how.status) == (text, status)


@pytest.mark.parametrize(("returncode", "how"), [(0, Exit()), (7, Exit(code=7)), (-9, Exit(signum=9))])
def test_how_a_child_ended(returncode: int, how: Exit) -> None:
    assert Exit.of(returncode) == how
