"""What ps calls the processes of a job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.job.title import host_name, title

PROGRAM = """
import ctypes, os, sys, threading
from kvstore.job.title import entitle

def called():
    return open("/proc/self/comm").read().strip()

def child():
    read, write = os.pipe()
    if not os.fork():
        os.write(write, called().encode())
        os._exit(0)
    os.wait()
    return os.read(read, 100).decode()

if sys.argv[1:]:
    ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)
before = called()
thread = threading.Thread(target=entitle, args=("worker", 3))
thread.start()
thread.join()
print(before, called(), child(), sep=",")
if not sys.argv[1:]:
    ctypes.CDLL(None).prctl(15, b"my own", 0, 0, 0)
    print(called(), child(), sep=",")
"""


def run(*words: str) -> list[list[str]]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True)
    return [line.split(",") for line in done.stdout.splitlines()]


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="processes have such names on Linux")
def test_a_process_is_called_after_its_member_and_its_forks_are_not_nor_is_one_that_has_a_name() -> None:
    first, later = run()
    assert first == [first[0], "worker-3", first[0]], "the name is the process's, whichever thread gives it"
    assert first[0].startswith("python")
    assert later == ["my own", "my own"], "a name that the program gives later is inherited, as always"
    assert run("trainer") == [["trainer"] * 3]


def test_titles_fit_and_say_who() -> None:
    assert [title("scheduler", 0), title("standby", 1), title("server", -1)] == ["scheduler", "standby-1", "server"]
    assert len(title("aggregator", 4095)) <= 15, "which is what Linux keeps"


def test_a_host_has_a_name_that_can_be_sent() -> None:
    assert host_name().encode()
