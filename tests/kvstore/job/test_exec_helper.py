"""The programs that become other ones: what they pass on, and which modules they take."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from waiting import LONG

from kvstore.job import exec_helper, our_module
from kvstore.job.exec_helper import FAILED
from kvstore.job.processes import words

SHOW = "import os; print(sorted(name for name in os.environ if name.startswith('X_')), os.environ.get('X_TEXT'))"


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    parent: int | None = None,
    files: int = -1,
    keeper: int = -1,
    missing: int = 0,
) -> tuple[subprocess.Popen[str], socket.socket]:
    """Start the helper and send it the request, of which the last ``missing`` bytes never come."""
    ours, theirs = socket.socketpair()
    fields = [*argv, *(f"{name}={value}" for name, value in env.items())]
    request = b"".join(os.fsencode(field) + b"\0" for field in fields)
    parent = os.getpid() if parent is None else parent
    numbers = (parent, theirs.fileno(), len(request), len(argv), files, keeper)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", exec_helper.__file__, *map(str, numbers)],
            pass_fds=tuple({theirs.fileno(), keeper} - {-1}),
            stdout=subprocess.PIPE,
            text=True,
        )
    ours.settimeout(LONG)
    ours.sendall(request[: len(request) - missing])
    if missing:
        ours.shutdown(socket.SHUT_WR)
    return process, ours


def test_it_becomes_the_program_with_its_words_and_environment() -> None:
    argv = [sys.executable, "-S", "-c", SHOW]
    process, channel = start(argv, {"X_TEXT": "a=b\n c", "X_EMPTY": "", "PATH": os.defpath})
    with channel, process:
        assert channel.recv(16) == b"", "the channel closes when the program runs"
        assert process.communicate(timeout=LONG)[0] == "['X_EMPTY', 'X_TEXT'] a=b\n c\n"
    assert process.returncode == 0


def test_the_program_is_looked_for_on_the_path_that_it_gets() -> None:
    process, channel = start(["sh", "-c", "exit 5"], {"PATH": os.defpath})
    with channel, process:
        assert channel.recv(16) == b""
    assert process.returncode == 5


@pytest.mark.parametrize(("program", "error"), [("/nowhere/program", errno.ENOENT), ("/", errno.EACCES)])
def test_a_program_that_cannot_be_executed_is_an_error_number(program: str, error: int) -> None:
    process, channel = start([program], {})
    with channel, process:
        assert int(channel.recv(16)) == error
    assert process.returncode == FAILED


def test_a_parent_that_has_given_up_gets_no_program() -> None:
    process, channel = start(["sh", "-c", "exit 5"], {"PATH": os.defpath}, missing=1)
    with channel, process:
        assert channel.recv(16) == b""
    assert process.returncode == FAILED


def test_where_the_parent_is_gone_nothing_runs() -> None:
    process, channel = start(["sh", "-c", "exit 5"], {"PATH": os.defpath}, parent=1 if os.getppid() != 1 else 2)
    with channel, process:
        assert channel.recv(16) == b""
    assert process.returncode == FAILED


def test_the_number_of_files_is_limited() -> None:
    show = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    process, channel = start([sys.executable, "-S", "-c", show], {}, files=77)
    with channel, process:
        assert process.communicate(timeout=LONG)[0].split() == [
            "77",
            str(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        ]


def test_the_keeper_is_told_before_the_program_runs() -> None:
    read, write = os.pipe()
    process, channel = start(["sh", "-c", "exit 5"], {"PATH": os.defpath}, keeper=write)
    os.close(write)
    with channel, process, os.fdopen(read) as told:
        assert told.read() == f"{process.pid}\n", "and nobody holds the pipe any more"
    assert process.returncode == 5


def test_a_keeper_that_has_died_does_not_matter() -> None:
    read, write = os.pipe()
    os.close(read)
    process, channel = start(["sh", "-c", "exit 5"], {"PATH": os.defpath}, keeper=write)
    os.close(write)
    with channel, process:
        assert channel.recv(16) == b""
    assert process.returncode == 5


THEIRS = "print('theirs')"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory whose modules have the names of all our packages, and of the program's neighbors."""
    for name in our_module.PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(THEIRS)
        (tmp_path / name / "__main__.py").write_text(THEIRS)
    (tmp_path / "files.py").write_text(THEIRS)
    return tmp_path


@pytest.mark.parametrize("on_path", [False, True])
def test_servers_are_ours(folder: Path, on_path: bool) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "PYTHONPATH"))}
    env["DMLC_ROLE"] = "server"
    if on_path:
        env["PYTHONPATH"] = str(folder)
    done = subprocess.run(
        words(sys.executable, "servers"), cwd=folder, env=env, capture_output=True, text=True, timeout=LONG
    )
    assert done.returncode == 1
    assert done.stderr.startswith("ConfigError: ")
    assert done.stdout == ""


def test_only_our_packages_are_found_in_our_directory() -> None:
    finder = our_module.OurPackages()
    for name in our_module.PACKAGES:
        spec = finder.find_spec(name, None)
        assert spec is not None
        assert spec.origin == f"{our_module.ROOT}/{name}/__init__.py"
    assert finder.find_spec("tests", None) is None
    assert finder.find_spec("kvstore.job", ["/nowhere"]) is None
