"""A worker that hangs, in whatever call: those who wait for it say at which line it is."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from jobs import job

# Worker 1 hangs in one call after the other. Worker 0 asks until it hears of that call, and then ends it.
HANGS = """
    import contextlib, ctypes, datetime, os, pathlib, signal, threading, time
    import numpy as np
    import torch.distributed
    import kvstore as kv

    FIFO = str(pathlib.Path(__file__).parent / "fifo")
    lock, beats_s = threading.Lock(), 1.0

    class Released(Exception):
        pass

    def release(*_):
        raise Released

    def byte_comes(then):
        with open(FIFO, "rb") as fifo:
            fifo.read(1)
        then()

    def in_sleep():
        with contextlib.suppress(Released):
            time.sleep(60)  # sleep

    def hold():
        lock.acquire()
        threading.Thread(target=byte_comes, args=(lock.release,)).start()  # waits, too, on a busy machine

    def in_lock():
        hold()
        with lock:  # lock
            pass

    def in_read():
        fd = os.open(FIFO, os.O_RDWR)
        os.read(fd, 1)  # read
        os.close(fd)

    def in_barrier():
        torch.distributed.barrier()  # barrier

    def in_c():
        fd = os.open(FIFO, os.O_RDWR)
        time.sleep(beats_s)  # c
        ctypes.PyDLL(None).read(fd, ctypes.create_string_buffer(1), 1)
        os.close(fd)

    def in_stop():
        time.sleep(beats_s)  # stop
        os.kill(os.getpid(), signal.SIGSTOP)

    def write(pid):
        with open(FIFO, "wb") as fifo:
            fifo.write(b"x")

    CASES = {
        "sleep": (in_sleep, "in in_sleep", lambda pid: os.kill(pid, signal.SIGUSR1)),
        "lock": (in_lock, "in in_lock", write),
        "read": (in_read, "in in_read", write),
        "barrier": (in_barrier, "in in_barrier", lambda pid: torch.distributed.barrier()),
        "c": (in_c, "keeps the interpreter's lock", write),
        "stop": (in_stop, "is stopped", lambda pid: os.kill(pid, signal.SIGCONT)),
    }
    signal.signal(signal.SIGUSR1, release)
    store = kv.create("dist_sync")
    torch.distributed.init_process_group(
        "gloo", f"file://{FIFO}-group", timeout=datetime.timedelta(seconds=60), rank=store.rank, world_size=2
    )
    pids = np.zeros(2, np.float64)
    store.init("w", pids)
    store.pushpull("w", np.eye(2)[store.rank] * os.getpid(), out=pids)
    for case, (hang, words, end) in CASES.items():
        if store.rank == 1:
            hang()
            store.pushpull("w", np.zeros(2))
            continue
        ticket, said = store.pushpull("w", np.zeros(2), wait=False), ""
        while words not in said:
            began = time.monotonic()
            try:
                ticket.wait(0.1)
            except kv.DeadlineExceeded as exc:
                said = str(exc)
        print(f"{case} after {time.monotonic() - began:.1f} s: {said}", flush=True)
        end(int(pids[1]))
        ticket.wait()
    store.barrier()
"""

# What is said of each call, of which LINE is the place. Of the last two the process beside the worker knows.
SAID = {
    "sleep": "is at LINE in in_sleep",
    "lock": "is at LINE in in_lock",
    "read": "is at LINE in in_read",
    "barrier": r"is at LINE in in_barrier, which is in torch.distributed \(torch/distributed/.*:\d+ in barrier\)",
    "c": "is in a call that keeps the interpreter's lock.*: no heartbeat for .* s; at its last beat it was at LINE .*",
    "stop": "is stopped by a signal: no sign of life for .* s; at its last beat it was at LINE .*",
}


@pytest.mark.release
def test_the_line_at_which_a_missing_worker_is_is_named_whatever_it_does(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with job(tmp_path, HANGS, servers=1) as running:
        assert running.wait() == 0, running.output
    script = (tmp_path / "script.py").read_text().splitlines()
    for number, (case, words) in enumerate(SAID.items(), 1):
        (line,) = (place for place, text in enumerate(script, 1) if text.endswith(f"# {case}"))
        place = words.replace("LINE", f"{re.escape(str(tmp_path))}/script.py:{line}")
        reason = f"server 0 waits for worker 1, whose push {number + 1} of 'w' is missing"
        (said,) = re.findall(rf"^\[worker 0\] {case} (.*)$", running.output, re.MULTILINE)
        assert re.fullmatch(rf"after .* s: pushpull of 'w' .*: {reason}; worker 1 {place}", said), said
