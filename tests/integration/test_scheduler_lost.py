"""A real job whose scheduler is killed again and again."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from jobs import job
from waiting import LONG, PROMPT

SCRIPT = """
    import os
    import signal
    import time
    from pathlib import Path

    import numpy as np
    import kvstore as kv

    took = {}

    def kill():
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                env = (entry / "environ").read_bytes().split(b"\\0")
            except OSError:
                continue
            if b"DMLC_ROLE=scheduler" in env and b"TEST_MARK=" + os.environb[b"TEST_MARK"] in env:
                os.kill(int(entry.name), signal.SIGKILL)

    def timed(name, call, *args):
        began = time.monotonic()
        result = call(*args)
        took[name] = max(took.get(name, 0.0), time.monotonic() - began)
        return result

    first = os.environ["DMLC_TASK_ID"] == "0"
    if first:
        kill()
    store = timed("create", kv.create, "dist_sync")
    if first:
        kill()
    timed("init", store.init, "a", np.zeros(100_000, np.float32))
    out = np.zeros(100_000, np.float32)
    for number in range(300):
        if number == 100 and first:
            kill()
        timed("round", store.pushpull, "a", np.full(100_000, store.rank + 1.0, np.float32), out)
    assert (out == 3.0).all()
    timed("barrier", store.barrier)
    assert store.num_dead_nodes() == 0
    if first:
        kill()
    timed("close", store.close)
    print("took", took, flush=True)
"""


@pytest.mark.faults
@pytest.mark.parametrize("transport", ["sockets", "tcp", "zeromq"])
def test_a_scheduler_that_is_killed_again_and_again_delays_no_round(tmp_path: Path, transport: str) -> None:
    options = ("--restarts", "4")
    with job(tmp_path, SCRIPT, servers=1, options=options, KVSTORE_TRANSPORT=transport) as running:
        assert running.wait(LONG) == 0, running.output
    line = r"\[scheduler\] the scheduler was lost \(SIGKILL\); its successor took over in \d+\.\d s\n"
    said = re.findall(line, running.output)
    assert len(said) == 4, running.output
    took = [ast.literal_eval(line) for line in re.findall(r"took (\{.*\})", running.output)]
    assert len(took) == 2
    for each in took:
        assert each["round"] < 1.0
        assert max(each.values()) < PROMPT
