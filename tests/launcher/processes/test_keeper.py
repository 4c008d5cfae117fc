from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import LONG, until

from launcher.processes import keeper

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere there is no /proc")


@pytest.fixture
def mark() -> str:
    return f"TEST_MARK={uuid.uuid4().hex}"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def sleeper(mark: str = "A=b") -> subprocess.Popen[bytes]:
    name, _, value = mark.partition("=")
    env = {"PATH": os.defpath, name: value}
    return subprocess.Popen(["sleep", "600"], env=env, start_new_session=True)


def test_processes_are_found_by_session_and_by_mark(mark: str, started: list[subprocess.Popen[bytes]]) -> None:
    by_session, by_mark, stranger = sleeper(), sleeper(mark), sleeper()
    started += [by_session, by_mark, stranger]
    found = until(lambda: len(both := keeper.strays({by_session.pid}, mark)) == 2 and both)
    assert found == {by_session.pid: by_session.pid, by_mark.pid: by_mark.pid}
    assert keeper.strays([], f"{mark}0") == {}


def test_a_dead_process_is_not_found(mark: str, started: list[subprocess.Popen[bytes]]) -> None:
    started.append(sleeper(mark))
    until(lambda: keeper.strays([], mark))
    started[0].kill()
    until(lambda: not keeper.strays([started[0].pid], mark))


def test_a_signal_goes_to_all_of_a_job_and_to_nobody_else(mark: str, started: list[subprocess.Popen[bytes]]) -> None:
    by_session, by_mark, stranger = sleeper(), sleeper(mark), sleeper()
    started += [by_session, by_mark, stranger]
    until(lambda: keeper.strays([], mark))
    keeper.signal_all([by_session.pid, 2**22 + 1], mark, signal.SIGTERM)
    assert [process.wait(LONG) for process in (by_session, by_mark)] == [-15, -15]
    assert stranger.poll() is None


def test_killing_goes_on_until_nothing_is_left(mark: str) -> None:
    name, _, value = mark.partition("=")
    forking = "import os, time\nfor _ in range(200):\n    os.fork() or time.sleep(600)\n    time.sleep(0.001)"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", forking], env={name: value}, start_new_session=True, stderr=subprocess.DEVNULL
    ) as process:
        until(lambda: len(keeper.strays([], mark)) > 3)
        keeper.kill_all([process.pid], mark)
        assert keeper.strays([process.pid], mark) == {}


@pytest.mark.parametrize(
    ("lines", "expected"), [(b"12\n345\nbye\n", None), (b"12\n345\n", {12, 345}), (b"12\n34", {12}), (b"", set())]
)
def test_what_it_is_told(lines: bytes, expected: set[int] | None) -> None:
    read, write = os.pipe()
    os.write(write, lines)
    os.close(write)
    assert keeper.watch(read) == expected
    os.close(read)


def run(directory: Path, mark: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-I", keeper.__file__, str(directory), mark, "no-such-job"]
    return subprocess.Popen(argv, stdin=subprocess.PIPE)


def test_a_goodbye_leaves_everything_as_it_is(
    tmp_path: Path, mark: str, started: list[subprocess.Popen[bytes]]
) -> None:
    started.append(sleeper(mark))
    until(lambda: keeper.strays([], mark))
    run(tmp_path, mark).communicate(b"%d\nbye\n" % started[0].pid, LONG)
    assert started[0].poll() is None
    assert tmp_path.exists()


def test_without_one_what_was_started_is_killed_and_the_directory_goes(
    tmp_path: Path, mark: str, started: list[subprocess.Popen[bytes]]
) -> None:
    directory = tmp_path / "job"
    directory.mkdir()
    (directory / "socket").touch()
    started += [sleeper(mark), sleeper()]
    until(lambda: keeper.strays([], mark))
    with run(directory, mark) as process:
        process.communicate(b"%d\n" % started[1].pid, LONG)
        assert process.returncode == 0
    assert [process.wait(LONG) for process in started] == [-9, -9]
    assert not directory.exists()
