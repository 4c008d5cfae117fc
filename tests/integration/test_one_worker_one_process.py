"""A worker's own processes, and two workers that wait for each other, in a real job."""

from __future__ import annotations

from pathlib import Path

from jobs import job

SCRIPT = """
import os
import subprocess
import sys
import numpy as np
import kvstore as kv

if sys.argv[1:] == ["child"]:
    kv.create("dist_sync")
store = kv.create("dist_sync")
value = np.zeros(3, np.float32)
store.init(["a", "b"], [value, value])
if store.rank == 0:
    print("the child ended with", subprocess.run([sys.executable, __file__, "child"]).returncode, flush=True)
if os.fork() == 0:
    os._exit(0)
ended = 0
try:
    while True:
        os.wait()
        ended += 1
except ChildProcessError:
    print("children:", ended, flush=True)
store.barrier()
store.pushpull("a" if store.rank == 0 else "b", value, out=value)
"""


def test_children_are_told_and_workers_that_wait_for_each_other_end(tmp_path: Path) -> None:
    with job(tmp_path, SCRIPT) as running:
        assert running.wait() == 1, running.output
        assert not running.members()
    lines = running.output.splitlines()
    told = next(line for line in lines if "kvstore.errors.ConfigError: worker 0 of this job is process" in line)
    assert told.startswith("[worker 0] ")
    assert "[worker 0] the child ended with 1" in lines
    assert {"[worker 0] children: 1", "[worker 1] children: 1"} <= set(lines)
    assert "never ends: workers 0, 1 wait for each other: worker 0 is in pushpull of 'a' at " in lines[-1]
    assert f"worker 1 is in pushpull of 'b' at {tmp_path / 'script.py'}:25 in <module>: server " in running.output
