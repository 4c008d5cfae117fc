"""What a user of Windows is told. The system is pretended: `sys.platform`, and the modules that Windows lacks."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LONG

from kvstore.job.system import cores, cpu_us, memory_bytes, unsupported

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
