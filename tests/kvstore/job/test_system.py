"""What a process asks of the system and is called there: its cores, memory and threads, and what Windows lacks."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LONG

from kvstore.job.processes import host_name, title
from kvstore.job.system import cores, cpu_us, memory_bytes, unsupported
from kvstore.job.threads import WAITING, variables

ROOT = Path(__file__).resolve().parents[3]

WINDOWS = """
import os, sys
import importlib.util, subprocess  # which choose by the system, and were chosen for this one
sys.platform = "win32"
for name in ("fcntl", "resource"):
    sys.modules[name] = None
del os.register_at_fork, os.getuid
"""
STORE = """
import kvstore as kv
try:
    kv.create("dist_async")
except kv.ConfigError as error:
    print(error, file=sys.stderr)
    sys.exit("torch" in sys.modules)
"""
CALL = """
import launcher
try:
    launcher.run(print)
except launcher.LaunchError as error:
    print(error, file=sys.stderr)
    sys.exit(0)
"""
COMMAND = "import runpy; sys.argv[1:] = ['-n', '1', 'true']; runpy.run_module('launcher', run_name='__main__')"


@pytest.mark.parametrize(
    ("code", "what", "status"),
    [(STORE, "kv.create('dist_async')", 0), (CALL, "launcher.run", 0), (COMMAND, "launch.py", 2)],
)
def test_windows_is_told_so_at_once(code: str, what: str, status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WINDOWS + code], cwd=ROOT, capture_output=True, text=True, timeout=LONG
    )
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    assert done.stderr.startswith(f"{what} runs on Linux and macOS, but not on Windows")
    assert "run it in WSL 2" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_other_systems_are_not(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert unsupported("launch.py") == ""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be bound here")
def test_cores_are_those_that_this_process_may_use() -> None:
    before = os.sched_getaffinity(0)
    assert cores() == len(before)
    try:
        os.sched_setaffinity(0, [min(before)])
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_memory_is_what_is_there_now():
    before = memory_bytes()
    with mmap.mmap(-1, 64 << 20) as fresh:  # the heap might take pages that it has kept
        fresh.write(bytes(1 << 20) * 64)
        held = memory_bytes()
    assert held - before > 60 << 20
    assert held - memory_bytes() > 60 << 20


def test_without_proc_memory_is_the_most_there_has_been():
    assert memory_bytes(Path("/proc/no-such-file")) >= 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 0.9


def test_processor_time_grows():
    before = cpu_us()
    sum(range(300_000))
    assert cpu_us() > before


PROGRAM = """
import ctypes, os, sys, threading
from kvstore.job.processes import entitle

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


@pytest.mark.parametrize(("role", "more"), [("server", {}), ("worker", {"GOMP_SPINCOUNT": "1000"})])
def test_threads_do_not_keep_cores_while_they_wait_and_members_of_a_role_share_them(
    role: str, more: dict[str, str]
) -> None:
    made = variables({}, role, cores=8, siblings=3)
    assert made == {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "2", **more}


@pytest.mark.parametrize("siblings", [0, 3, 8])
def test_each_has_a_thread_at_least(siblings: int) -> None:
    assert variables({}, "server", cores=2, siblings=siblings)["OMP_NUM_THREADS"] == ("2" if not siblings else "1")


@pytest.mark.parametrize("cores", [0, 8])
def test_an_aggregator_has_one_thread_unless_a_number_is_set(cores: int) -> None:
    assert variables({}, "aggregator", cores=cores) == {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}
    assert variables({"OMP_NUM_THREADS": "3"}, "aggregator", cores=cores) == {"OMP_WAIT_POLICY": "passive"}


def test_where_nobody_knows_the_siblings_the_number_is_left_to_torch() -> None:
    assert variables({}, "server") == {"OMP_WAIT_POLICY": "passive"}


def test_the_scheduler_has_no_torch() -> None:
    assert variables({}, "scheduler", cores=8) == {}


@pytest.mark.parametrize("name", WAITING)
def test_whoever_says_how_threads_wait_in_any_runtimes_words_is_obeyed(name: str) -> None:
    assert variables({name: "1000"}, "worker", cores=4) == {"OMP_NUM_THREADS": "4"}


def test_a_number_that_is_set_stays_and_an_empty_value_counts_as_not_set() -> None:
    env = {"OMP_NUM_THREADS": "5", "OMP_WAIT_POLICY": ""}
    assert variables(env, "server", cores=4) == {"OMP_WAIT_POLICY": "passive"}
    assert variables({"OMP_NUM_THREADS": ""}, "server", cores=4)["OMP_NUM_THREADS"] == "4"
