"""What tests rely on: the line that is cut, jobs in threads, skips that are failures in CI, and forked processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from line import Line
from strangers import place
from threaded import ThreadedJob
from waiting import LONG, until

from kvstore.client import DistStore

# ---- the line of ``line.py``: what it passes on, and what it does when it is cut or its server has gone


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(LONG)
        yield listening


@pytest.fixture
def line(server: socket.socket) -> Iterator[Line]:
    made = Line(f"tcp://127.0.0.1:{server.getsockname()[1]}")
    yield made
    made.close()
    assert made.alive == 0


def connect(line: Line) -> socket.socket:
    return socket.create_connection(place(line.endpoint), timeout=LONG)


def test_what_comes_is_passed_on_both_ways_until_it_is_cut(line: Line, server: socket.socket) -> None:
    with connect(line) as client:
        with server.accept()[0] as there:
            client.sendall(b"ask")
            assert there.recv(16) == b"ask"
            there.sendall(b"answer")
            assert client.recv(16) == b"answer"
            line.cut()
            assert client.recv(16) == there.recv(16) == b""
        until(lambda: line.passed == [3], "what was passed to be counted")  # that comes after it was passed
    with connect(line) as client, server.accept()[0] as there:
        client.sendall(b"again")
        assert there.recv(16) == b"again"


def test_what_a_stopped_line_has_not_passed_on_is_lost_when_it_is_cut(line: Line, server: socket.socket) -> None:
    with connect(line) as client, server.accept()[0] as there:
        client.sendall(b"before")
        assert there.recv(16) == b"before"
        line.stop()
        client.sendall(b"held")
        line.cut()
        assert there.recv(16) == b""


def test_a_client_whose_server_has_gone_is_told_so_as_by_the_server_itself(line: Line, server: socket.socket) -> None:
    """ZeroMQ makes a connection anew at any time: a test may end just then."""
    server.close()
    for _ in range(2):
        with connect(line) as client:
            assert client.recv(16) == b""


# ---- what tests with jobs in threads rely on: the error that came first is the one they show


def test_the_first_failure_is_raised_and_the_others_do_not_wait_for_it() -> None:
    waits = threading.Event()

    def work(store: DistStore) -> float:
        store.init("w", torch.zeros(1))
        out = torch.zeros(1)
        if store.rank == 0:
            waits.set()
        else:
            assert waits.wait(LONG)
            if broken:
                raise ZeroDivisionError
        store.pushpull("w", torch.ones(1), out)
        return out.item()

    with ThreadedJob(2, 1, timeout_s=10 * LONG) as job:
        began, broken = time.monotonic(), True
        with pytest.raises(ZeroDivisionError):
            job.run(work)
        assert time.monotonic() - began < LONG
        broken = False
        assert job.run(work) == [2, 2], "the job can still be used"


# ---- required


TESTS = """
import pytest

def test_that_skips():
    pytest.skip("no teapot here")

@pytest.mark.skipif(True, reason="no kettle here")
def test_that_is_marked():
    pass

@pytest.fixture
def cup():
    pytest.skip("no cup here")

def test_with_a_fixture_that_skips(cup):
    pass

def test_on_a_gpu():
    pytest.skip("there is no CUDA device")

@pytest.mark.xfail
def test_known_to_fail():
    assert False

def test_that_passes():
    pass
"""


def run(tmp_path: Path, *words: str, text: str = TESTS, **env: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "test_it.py"
    path.write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, *words, tmp_path],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), **env},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )


def required(tmp_path: Path, require: str) -> subprocess.CompletedProcess[str]:
    return run(tmp_path, "-p", "required", KVSTORE_TESTS_REQUIRE=require)


def test_where_all_is_required_what_the_machine_lacks_is_a_failure(tmp_path: Path) -> None:
    done = required(tmp_path, "all")
    assert done.returncode == 1, done.stdout
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed, 2 errors" in done.stdout  # what is lacking before a test: errors
    for thing in ("teapot", "kettle", "cup"):
        assert f"KVSTORE_TESTS_REQUIRE=all, but this would be skipped: no {thing} here" in done.stdout


def test_elsewhere_it_is_skipped(tmp_path: Path) -> None:
    done = required(tmp_path, "")
    assert done.returncode == 0, done.stdout
    assert "1 passed, 4 skipped, 1 xfailed" in done.stdout


def test_what_cannot_be_required_is_an_error(tmp_path: Path) -> None:
    done = required(tmp_path, "cluster")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "KVSTORE_TESTS_REQUIRE=cluster: it can be all, or be left out" in done.stderr


# ---- forked


KILLED = """
import os, signal

def test_that_is_killed():
    os.kill(os.getpid(), signal.SIGKILL)

def test_behind_it():
    pass
"""
PARTED = """
import os, warnings
import pytest

COLLECTED = os.getpid()

@pytest.fixture(scope="module")
def whose():
    yield os.getpid()
    print("the end of", os.getpid())

@pytest.mark.parametrize("number", range(20))
def test_that_passes(number, whose):
    assert whose == os.getpid() != COLLECTED

def test_that_fails(whose):
    os.system("echo words of a child")
    assert not whose

def test_that_warns():
    warnings.warn("be careful")
"""


@pytest.mark.long
def test_forked_processes_run_each_test_once_and_one_that_dies_is_told(tmp_path: Path) -> None:
    (tmp_path / "test_first.py").write_text(KILLED)
    done = run(tmp_path, "-p", "forked", "--processes", "2", "-vv", text=PARTED)
    assert done.returncode == 1, done.stdout
    assert "3 failed, 21 passed, 1 warning" in done.stdout
    for number in range(20):
        assert done.stdout.count(f"::test_that_passes[{number}] PASSED") == 1
    assert "test_that_is_killed - its process ended with -9" in done.stdout
    assert "test_behind_it - it was not run" in done.stdout
    assert "words of a child" in done.stdout
    assert "UserWarning: be careful" in done.stdout


@pytest.mark.long
def test_forked_processes_stop_where_one_failure_is_enough(tmp_path: Path) -> None:
    (tmp_path / "test_first.py").write_text(PARTED.replace("20", "0"))
    done = run(tmp_path, "-p", "forked", "--processes", "1", "-x", text=PARTED)
    assert done.returncode == 1, done.stdout
    assert "stopping after 1 failures" in done.stdout
    assert "1 failed, 1 skipped in" in done.stdout, "no test ran after it"
